"""The journal says when it was touched, and survives a crash in the middle of a line."""

import json

import pytest

from longstraw_sdk import InputError
from longstraw_sdk.evidence.digests import seal
from longstraw_sdk.evidence.journal import Journal


@pytest.fixture
def path(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    for i in range(4):
        journal.append("stepped", update=i)
    return journal.path


def test_entries_are_read_back_and_go_on(path):
    journal = Journal(path)
    assert [(e["seq"], e["stage"], e["update"]) for e in journal.entries] == [(i, "stepped", i) for i in range(4)]
    journal.append("ended")
    assert Journal(path).entries == journal.entries and len(journal.entries) == 5


@pytest.mark.parametrize("cut", [1, 30, -1])
def test_a_line_that_a_crash_cut_off_is_dropped(path, cut):
    data = path.read_bytes()
    last = data.rindex(b"\n", 0, -1) + 1
    path.write_bytes(data[: last + cut] if cut > 0 else data[:cut])
    journal = Journal(path)
    assert len(journal.entries) == 3
    journal.append("ended")
    assert [e["stage"] for e in Journal(path).entries] == ["stepped"] * 3 + ["ended"]


def changed_fact(lines):
    lines[1] = lines[1].replace('"update": 1', '"update": 7')


def resealed(lines):
    entry = json.loads(lines[1]) | {"update": 7}
    lines[1] = json.dumps(entry | {"sha256": seal(entry)}, sort_keys=True)


DAMAGE = {
    "entry 1 was changed": [changed_fact],
    "before 2 is missing": [resealed, lambda lines: lines.insert(2, lines.pop(3))],
    "before 1 is missing": [lambda lines: lines.pop(1), lambda lines: lines.insert(1, lines[0])],
    "before 0 is missing": [lambda lines: lines.pop(0)],
    "entry 2: ": [lambda lines: lines.__setitem__(2, "{"), lambda lines: lines.__setitem__(2, "{}")],
    "entry 3 was changed": [lambda lines: lines.__setitem__(3, lines[3].replace("stepped", "ended"))],
}


@pytest.mark.parametrize(("told", "damage"), [(told, d) for told, kinds in DAMAGE.items() for d in kinds])
def test_a_journal_that_was_touched_is_refused(path, told, damage):
    lines = path.read_text().splitlines()
    damage(lines)
    path.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(InputError) as error:
        Journal(path)
    assert told in str(error.value)
