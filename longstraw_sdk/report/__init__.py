"""A page about a run, from the files that it left."""

from .page import write_page
from .recorded import Recorded, read_run

__all__ = ["Recorded", "read_run", "write_page"]
