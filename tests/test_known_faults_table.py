"""The table of docs/known-faults.md: every row once, every test that it names there."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "known-faults.md"
TEST = re.compile(r"`(tests/\w+\.py)::(\w+)`")
REPORT = re.compile(r"\[[\w.-]+#(\d+)\]\(https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/(\d+)\)")


def rows(text):
    """Cells of the rows whose first cell is a number."""
    lines = [line.strip().strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {i: cells for i, cells in enumerate(lines) if cells[0].strip().isdigit()}.values()


@cache
def functions(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def problems(text):
    found = []
    numbers = [int(cells[0]) for cells in rows(text)]
    if sorted(numbers) != list(range(1, 62)):
        found.append(f"rows are {sorted(numbers)}, not 1 to 61")
    for cells in rows(text):
        number = cells[0].strip()
        if len(cells) != 4 or not all(cell.strip() for cell in cells):
            found.append(f"row {number} has not four cells")
            continue
        report = REPORT.fullmatch(cells[1].strip())
        if report is None or report[1] != report[2]:
            found.append(f"row {number} links no report")
        stands = cells[3]
        reason = re.sub(r"\W+", " ", TEST.sub("", stands)).split()
        if not TEST.search(stands) and len(reason) < 5:
            found.append(f"row {number} has neither a test nor a reason")
    for path, name in TEST.findall(text):
        if not (ROOT / path).is_file() or name not in functions(path):
            found.append(f"{path}::{name} is not there")
    if "tests/" in TEST.sub("", text).replace("`tests/test_known_faults_table.py`", ""):
        found.append("a test is named in another way than `tests/file.py::name`")
    return found


def test_the_table_is_whole_and_names_tests_that_exist():
    assert problems(PAGE.read_text(encoding="utf-8")) == []


def test_control_what_is_missing_is_told():
    text = PAGE.read_text(encoding="utf-8")
    name = TEST.search(text)[0]
    first = next(line for line in text.splitlines() if line.startswith("| 1 |"))
    assert problems(text.replace(first, "")) == ["rows are " + str(list(range(2, 62))) + ", not 1 to 61"]
    assert problems(text.replace(name, name.replace("::test_", "::test_no_"))) != []
    cells = first.split(" | ")
    assert problems(text.replace(cells[3], "covered |")) == ["row 1 has neither a test nor a reason"]
    assert problems(text.replace(cells[1], "trl#4585")) == ["row 1 links no report"]
