"""Data sets for TRL: audited mathematics problems, and long-context tasks built from a folder of text files."""

from .audit import FAULT_KINDS, AuditReport, TokenLengths, audit_rows
from .cleaned import CleanedFiles, write_cleaned
from .dapo_math import MathRow, MathRows, load_math_rows
from .document_qa import document_qa_dataset
from .documents import Corpus, Document, read_corpus
from .needles import NeedleTask, needle_dataset

__all__ = [
    "load_math_rows",
    "MathRow",
    "MathRows",
    "audit_rows",
    "AuditReport",
    "TokenLengths",
    "FAULT_KINDS",
    "write_cleaned",
    "CleanedFiles",
    "read_corpus",
    "Corpus",
    "Document",
    "needle_dataset",
    "NeedleTask",
    "document_qa_dataset",
]
