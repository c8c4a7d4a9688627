"""Sphinx: python -m sphinx -W --keep-going -n -b html docs docs/_build"""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from command_reference import commands, train_options

import longstraw_sdk

project = "LongStraw SDK"
author = "LongStraw contributors"
copyright = "LongStraw contributors, Apache-2.0"
version = release = longstraw_sdk.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
highlight_language = "text"
html_theme = "furo"
html_title = "LongStraw SDK"
html_show_sphinx = False

myst_heading_anchors = 3
smartquotes_action = "D"  # dashes alone: "full" is a value to copy

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "exclude-members": "__init__"}
autodoc_type_aliases = {name: name for name in ("CausalLM", "Groups", "Advantages")}
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Class attributes", "params_style")]

default_role = "py:obj"
_INTERNAL = (
    "BoundModel|ContextGroup|DeviceProfile|Links|MemoryPlan|ModelFacts|PagePool|PagedView|ResidentCache|ResidentState"
    "|SecondsPlan"
)
nitpick_ignore_regex = [
    ("py:obj", r"(?s).*"),  # backticks in a docstring hold any name; those of the reference become links
    ("py:.*", r"(torch|transformers|trl|peft|datasets|pathlib|collections|contextlib|os)\..*"),
    ("py:.*", r"(nn\.Module|LoraConfig|GenerationConfig|Dataset|Path|array|dist\.ProcessGroup)"),
    ("py:.*", r"(CausalLM|Groups|Advantages)"),  # aliases, explained where they are used
    ("py:.*", rf"(longstraw_sdk\..*\.)?({_INTERNAL})"),
]


def _literal_backticks(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Single backticks, as in Markdown: a plain name may become a link, anything else is literal."""

    def literal(match: re.Match[str]) -> str:
        return match[0] if re.fullmatch(r"[A-Za-z_][\w.]*", match[1]) else f"``{match[1]}``"

    lines[:] = re.sub(r"(?<!`)`([^`]+)`(?!`)", literal, "\n".join(lines)).split("\n")


def _factories(app: Any, what: str, name: str, obj: Any, options: Any, signature: str, returns: str) -> Any:
    """Defaults that a dataclass makes anew read `<factory>`, which is no Python and breaks the signature's layout."""
    return None if signature is None else (signature.replace("<factory>", "..."), returns)


def _insert_commands(app: Any, docname: str, source: list[str]) -> None:
    if docname == "commands":
        source[0] = source[0].replace("%COMMANDS%", commands()).replace("%TRAIN_OPTIONS%", train_options())


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _literal_backticks, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", _factories)
    app.connect("source-read", _insert_commands)
