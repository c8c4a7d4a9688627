"""Loading and auditing mathematics problems: nothing is dropped silently, and each fault is found once."""

import json

import pytest
from datasets import Dataset, DatasetDict, load_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw_sdk.cli import main
from longstraw_sdk.data import FAULT_KINDS, MathRows, audit_rows, load_math_rows, write_cleaned
from longstraw_sdk.data.answers import answer_fault
from longstraw_sdk.demo.tokenizer import byte_tokenizer
from longstraw_sdk.errors import ConfigurationError, InputError

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def dapo(text, answer, index=0):
    """A row with the fields of DAPO-Math-17k."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": text}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(index)},
    }


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def chat_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


GOOD = [dapo("What is 1+1?", "2"), dapo("Half of one?", r"\frac12"), dapo("All x?", "(1,2]")]


# -------------------- loading


@pytest.mark.parametrize("form", ["parquet", "jsonl", "json", "folder", "splits"])
def test_every_source_gives_the_same_rows(tmp_path, form):
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        Dataset.from_list(GOOD).to_parquet(path)
    elif form == "jsonl":
        write_jsonl(path, GOOD)
    elif form == "json":
        path.write_text(json.dumps(GOOD))
    elif form == "folder":
        Dataset.from_list(GOOD).save_to_disk(path)
    else:
        DatasetDict({"train": Dataset.from_list(GOOD), "test": Dataset.from_list(GOOD[:1])}).save_to_disk(path)
        assert len(load_math_rows(path, split="test")) == 1
        with pytest.raises(InputError, match="has no split 'dev'; it has train, test"):
            load_math_rows(path, split="dev")
    rows = load_math_rows(path)
    assert [(r.row, r.prompt, r.answer, r.faults) for r in rows] == [
        (0, [{"role": "user", "content": "What is 1+1?"}], "2", ()),
        (1, [{"role": "user", "content": "Half of one?"}], r"\frac12", ()),
        (2, [{"role": "user", "content": "All x?"}], "(1,2]", ()),
    ]
    assert rows[-1] == rows[2] and rows[0:2] == [rows[0], rows[1]]
    with pytest.raises(IndexError):
        rows[3]


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"prompt": "p", "answer": "5"}, "5"),
        ({"prompt": "p", "answer": 5}, "5"),
        ({"prompt": "p", "answer": 0.5}, "0.5"),
        ({"prompt": "p", "solution": "34"}, "34"),
        ({"prompt": "p", "solution": r"We see \boxed{1}, so \boxed{\frac{3}{4}}."}, r"\frac{3}{4}"),
        ({"prompt": "p", "solution": "worked out: 5", "answer": "5"}, "5"),
        ({"prompt": "p", "answer": "5", "reward_model": {"ground_truth": "5"}}, "5"),
        ({"prompt": "p", "answer": "5", "reward_model": None}, "5"),
        ({"prompt": "p", "answer": None}, ""),
    ],
)
def test_variants_of_the_answer(row, answer):
    (found,) = MathRows([row])
    assert (found.prompt, found.answer, found.faults) == ("p", answer, ())


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ([1, 2], "the row is a list"),
        ({}, "no field prompt; the row has none"),
        ({"question": "?", "answer": "1"}, "no field prompt; the row has 'question', 'answer'"),
        ({"prompt": "p"}, "no reward_model.ground_truth, answer or solution"),
        ({"prompt": 5, "answer": "1"}, "prompt is a number"),
        ({"prompt": ["p"], "answer": "1"}, "prompt[0] is text, not a message"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "prompt[0] has null as content"),
        ({"prompt": [{"role": "poet", "content": "x"}], "answer": "1"}, "the role 'poet'; known: system, user"),
        ({"prompt": [{"role": "user", "content": "x", "name": "y"}], "answer": "1"}, "the field 'name'"),
        ({"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}, "the last message of prompt"),
        ({"prompt": "p", "answer": ["1"]}, "answer is a list"),
        ({"prompt": "p", "answer": True}, "answer is a truth value"),
        ({"prompt": "p", "answer": float("nan")}, "not text or a finite number"),
        ({"prompt": "p", "reward_model": "5"}, "reward_model is text"),
        ({"prompt": "p", "answer": "5", "reward_model": {"ground_truth": "6"}}, "differ: ['5', '6']"),
        ({"\ud800": "p"}, r"no field prompt; the row has '\ud800'"),
        ({"prompt": "\ud800", "answer": "1"}, "prompt has half of a surrogate pair"),
        ({"prompt": "p", "answer": "\udc00"}, "answer has half of a surrogate pair"),
    ],
)
def test_other_layouts_are_named_and_rejected(row, fault):
    (found,) = MathRows([row])
    assert len(found.faults) >= 1 and fault in found.faults[0]
    report = audit_rows([row])
    assert (report.n_kept, report.count("schema")) == (0, 1)
    assert fault in report.reasons()[0][0][1]


def test_awkward_lines_stay_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "answer": "1"}\r\n'  # byte order mark, CRLF
        b"\r\n"
        b'{"prompt": "b\xe2\x80\xa8c", "answer": "2"}\n'  # U+2028 inside a text
        b'{"prompt": "d", "answer": "3", "answer": "4"}\n'
        b'{"prompt": "e\x00", "answer": "5"}\n'
        b'{"prompt": "f", "answer": NaN}\n'
        b'{"prompt": "\\ud83d", "answer": "6"}\n'
        b"not json\n" + b"[" * 100_000 + b"\n"
        b'{"prompt": "g", "answer": "7"}'  # no line end
    )
    rows = load_math_rows(path)
    assert len(rows) == 9 and rows[1].prompt == "b\u2028c"
    report = audit_rows(rows)
    assert report.kept == (0, 1, 8)
    details = {row: reasons[0][1] for row, reasons in report.reasons().items()}
    assert "key 'answer' occurs twice" in details[2] and "line 4" in details[2]
    assert "control character" in details[3] and "NaN" in details[4] and "surrogate" in details[5]
    assert "line 8 is not JSON" in details[6] and "line 9 is not JSON" in details[7]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", b"a,b", r"suffix '\.csv'; allowed: \.parquet"),
        ("rows.json", b'{"a": 1}', "holds an object"),
        ("rows.json", b"", "is not JSON"),
        ("rows.jsonl", b'{"prompt": "\xff"}', "is not UTF-8"),
        ("rows.parquet", b"PAR1", "cannot be read as parquet"),
        ("folder/rows.txt", b"", "is not a folder of datasets.save_to_disk"),
    ],
)
def test_sources_that_cannot_be_read(tmp_path, name, content, message):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_math_rows(path.parent if name.startswith("folder") else path)


@pytest.mark.parametrize("source", ["./nowhere", "/no/where", "rows.jsonl", "a/b.parquet", "a/b/c", "../a"])
def test_missing_paths_are_not_looked_for_on_the_hub(source, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *_: pytest.fail("the hub was asked"))
    with pytest.raises(InputError, match=r"does not exist; give a \.parquet"):
        load_math_rows(source)


def test_the_hub_is_asked_for_owner_and_name(monkeypatch):
    asked = []

    def hub(name):
        asked.append(name)
        return DatasetDict({"train": Dataset.from_list(GOOD)})

    monkeypatch.setattr("datasets.load_dataset", hub)
    assert len(load_math_rows("owner/DAPO-Math-17k")) == 3 and asked == ["owner/DAPO-Math-17k"]
    with pytest.raises(InputError, match=r"^'owner/name' has no split 'dev'; it has train$"):
        load_math_rows("owner/name", split="dev")
    monkeypatch.setattr("datasets.load_dataset", lambda name: (_ for _ in ()).throw(ConnectionError("offline")))
    with pytest.raises(InputError, match=r"nor does the hub serve it .*offline"):
        load_math_rows("owner/name")


# -------------------- auditing


def seeded_faults():
    """Rows 0 to 2 are good; each fault kind is seeded once (a conflict takes two rows)."""
    return [
        *GOOD,
        {"prompt": [{"role": "user", "content": "no answer here"}]},  # 3
        dapo(" \n", "1"),  # 4
        dapo("What is 3?", " "),  # 5
        dapo("What is 4?", "???"),  # 6
        dapo("x" * 200, "5"),  # 7
        dapo("Half  of one?\n", "0.5"),  # 8, as row 1 by white space and by value
        dapo("What is 6?", "6"),  # 9
        dapo("What is 6?", "7"),  # 10
    ]


def test_every_fault_is_found_once_and_only_once(chat_tokenizer):
    report = audit_rows(seeded_faults(), chat_tokenizer, max_prompt_tokens=100)
    found = {row: [kind for kind, _ in reasons] for row, reasons in report.reasons().items()}
    assert found == {
        3: ["schema"],
        4: ["empty_prompt"],
        5: ["empty_answer"],
        6: ["unparsable_answer"],
        7: ["too_long"],
        8: ["duplicate"],
        9: ["conflicting_answers"],
        10: ["conflicting_answers"],
    }
    assert report.kept == (0, 1, 2)
    assert {kind: report.count(kind) for kind in FAULT_KINDS} == dict.fromkeys(FAULT_KINDS, 1) | {
        "conflicting_answers": 2
    }
    reasons = report.reasons()
    assert reasons[8] == [("duplicate", "same prompt and answer as row 1")]
    assert reasons[9][0][1] == "the answers are '6' (row 9), '7' (row 10)"
    assert reasons[7][0][1].endswith("allowed are 100")


def test_a_row_has_all_its_reasons(chat_tokenizer):
    row = dapo("x" * 200, "")
    report = audit_rows([row, {"prompt": "", "answer": "cannot compare"}], chat_tokenizer, max_prompt_tokens=100)
    kinds = {r: [kind for kind, _ in reasons] for r, reasons in report.reasons().items()}
    assert kinds == {0: ["empty_answer", "too_long"], 1: ["empty_prompt", "unparsable_answer"]}


def test_the_published_repetition_is_counted_and_the_first_is_kept():
    rows = [dapo(f"What is {i}+1?", str(i + 1), index) for index in range(50) for i in range(20)]
    report = audit_rows(rows)
    assert (report.n_rows, report.n_kept, report.n_rejected) == (1000, 20, 980)
    assert report.kept == tuple(range(20)) and report.count("duplicate") == 980
    assert report.faults["duplicate"]["same prompt and answer as row 3"] == tuple(range(23, 1000, 20))


def test_one_kind_of_prompt_per_data_set():
    rows = [{"prompt": "text", "answer": "1"}, *GOOD]
    report = audit_rows(rows)
    assert report.kept == (1, 2, 3)
    assert report.reasons()[0] == [("schema", "prompt is text, unlike most; TRL takes one kind in a data set")]


def test_lengths_are_those_of_trl(chat_tokenizer):
    rows = [dapo("x" * n, str(n)) for n in range(1, 21)]
    lengths = audit_rows(rows, chat_tokenizer).prompt_tokens
    fixed = len(b"<user>\n<assistant>")
    assert (lengths.n_rows, lengths.min, lengths.max) == (20, 1 + fixed, 20 + fixed)
    assert (lengths.median, lengths.p95) == (10 + fixed, 19 + fixed)
    text = audit_rows([{"prompt": "βx", "answer": "1"}], byte_tokenizer()).prompt_tokens
    assert (text.min, text.max) == (3, 3)
    assert audit_rows(rows).prompt_tokens is None


def test_lengths_of_prompts_that_differ_in_white_space_are_their_own():
    rows = [{"prompt": "a b", "answer": "1"}, {"prompt": "a" + " " * 50 + "b", "answer": "1"}]
    report = audit_rows(rows, byte_tokenizer(), max_prompt_tokens=10)
    assert report.kept == (0,) and report.prompt_tokens.max == 52
    assert [kind for kind, _ in report.reasons()[1]] == ["too_long"]


def test_a_template_that_refuses_a_prompt_rejects_the_row():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}" + TEMPLATE
    )
    row = dapo("x", "1")
    row["prompt"].insert(0, {"role": "system", "content": "s"})
    report = audit_rows([row, *GOOD], tokenizer)
    assert report.kept == (1, 2, 3) and "no system prompts" in report.reasons()[0][0][1]


def test_options_that_cannot_work():
    with pytest.raises(ConfigurationError, match="has no chat template"):
        audit_rows(GOOD, byte_tokenizer())
    with pytest.raises(ConfigurationError, match="needs the model's tokenizer"):
        audit_rows(GOOD, max_prompt_tokens=5)
    with pytest.raises(ConfigurationError, match="at least 1"):
        audit_rows(GOOD, byte_tokenizer(), max_prompt_tokens=0)


@pytest.mark.parametrize(
    "answer", ["34", "-5", r"\frac{1}{2}", "(1,2]", r"\text{red}", "12 apples", "x=5", "n(n+1)/2", "$7$", "8."]
)
def test_answers_that_can_be_compared(answer):
    assert answer_fault(answer) is None


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("???", "no mathematics"),
        (r"\frac{", "no mathematics"),
        ("hello world", "'hello' as a product of letters"),
        ("None", "'None' as a product of letters"),
        ("1" * 401, "401 characters"),
        ("(" * 9 + "1" + ")" * 9, "nest 9 levels"),
        (r"\binom{1000000000}{500000000}", "binomial"),
    ],
)
def test_answers_that_cannot_be_compared(answer, fault):
    assert fault in answer_fault(answer)


texts = st.sampled_from(["", " ", "p", "q", "p ", "β"])
prompts = st.one_of(
    texts,
    st.none(),
    st.integers(),
    st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": texts}), max_size=1),
)
answers = st.sampled_from(["1", "2", "1.0", "", "???", None, 1, True, [], r"\frac12", "0.5"])
rows_of_any_kind = st.one_of(
    st.fixed_dictionaries({"prompt": prompts, "answer": answers}),
    st.fixed_dictionaries({"prompt": prompts}),
    st.sampled_from([None, 3, "row", [], {"\ud800": 1}, {"prompt": "\ud800", "answer": "\ud800"}]),
)


@settings(max_examples=120)
@given(st.lists(rows_of_any_kind, max_size=12), st.sampled_from([None, 1, 25]))
def test_kept_and_rejected_make_up_all_rows_and_a_second_audit_rejects_nothing(chat_tokenizer, rows, limit):
    report = audit_rows(rows, chat_tokenizer, limit)
    rejected = report.reasons()
    assert report.n_rows == len(rows) == report.n_kept + report.n_rejected
    assert set(report.kept) | set(rejected) == set(range(len(rows)))
    assert all(rejected.values()) and {kind for reasons in rejected.values() for kind, _ in reasons} <= set(FAULT_KINDS)
    again = audit_rows([rows[i] for i in report.kept], chat_tokenizer, limit)
    assert again.n_rejected == 0 and again.n_kept == report.n_kept
    json.dumps(report.as_dict(), ensure_ascii=False).encode()


# -------------------- cleaned copies


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("conversational", [True, False])
def test_a_cleaned_copy_rejects_nothing_and_loses_nothing(tmp_path, suffix, conversational, chat_tokenizer):
    raw = seeded_faults()
    if not conversational:
        raw = [{**row, "prompt": row["prompt"][0]["content"]} for row in raw]
    rows = MathRows(raw)
    report = audit_rows(rows, chat_tokenizer, 100)
    files = write_cleaned(raw, report, tmp_path / f"clean.{suffix}")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in vars(files).values())
    assert json.loads(files.report.read_text()) == json.loads(json.dumps(report.as_dict()))
    rejected = [json.loads(line) for line in files.rejected.read_text().splitlines()]
    assert [row["row"] for row in rejected] == list(report.reasons())
    assert [row["row"] for row in rejected if "prompt" not in row] == [8], "row 1 has what row 8 had"
    assert rejected[3]["answer"] == "???" and rejected[3]["reasons"][0]["kind"] == "unparsable_answer"
    kind = "json" if suffix == "jsonl" else "parquet"
    cleaned = load_dataset(kind, data_files=str(files.cleaned), split="train", cache_dir=str(tmp_path / "cache"))
    assert cleaned.column_names == ["prompt", "answer", "row"] and cleaned["row"] == [0, 1, 2]
    assert list(cleaned["answer"]) == ["2", r"\frac12", "(1,2]"]
    again = audit_rows(load_math_rows(files.cleaned), chat_tokenizer, 100)
    assert (again.n_rows, again.n_kept, again.n_rejected) == (3, 3, 0)
    assert load_math_rows(files.cleaned)[1].prompt == rows[1].prompt


def test_nothing_is_kept_and_still_written(tmp_path):
    rows = MathRows([{"prompt": "", "answer": ""}])
    for suffix in ("parquet", "jsonl"):
        files = write_cleaned(rows, audit_rows(rows), tmp_path / f"none.{suffix}", overwrite=True)
        assert len(load_math_rows(files.cleaned)) == 0


def test_files_are_not_overwritten_unless_asked_and_never_half_written(tmp_path, monkeypatch):
    rows = MathRows(GOOD)
    report = audit_rows(rows)
    files = write_cleaned(rows, report, tmp_path / "clean.jsonl")
    before = files.cleaned.read_bytes()
    with pytest.raises(InputError, match=r"clean\.jsonl.* exists"):
        write_cleaned(rows, report, files.cleaned)
    files.cleaned.unlink()
    with pytest.raises(InputError, match=r"clean\.rejected\.jsonl.* exists"):
        write_cleaned(rows, report, files.cleaned)
    write_cleaned(rows, report, files.cleaned, overwrite=True)
    assert files.cleaned.read_bytes() == before
    assert files.cleaned.stat().st_mode == (tmp_path / "clean.report.json").stat().st_mode
    monkeypatch.setattr("longstraw_sdk.data.cleaned._kept", lambda *_: iter([{"prompt": object()}]))
    with pytest.raises(TypeError):
        write_cleaned(rows, report, files.cleaned, overwrite=True)
    assert files.cleaned.read_bytes() == before and len(list(tmp_path.iterdir())) == 3


def test_outputs_that_cannot_work(tmp_path):
    rows = MathRows(GOOD)
    report = audit_rows(rows)
    with pytest.raises(ConfigurationError, match=r"must end in \.parquet or \.jsonl"):
        write_cleaned(rows, report, tmp_path / "clean.csv")
    with pytest.raises(InputError, match="does not exist; create it"):
        write_cleaned(rows, report, tmp_path / "none" / "clean.jsonl")
    with pytest.raises(InputError, match="the report is of 3 rows, but 1"):
        write_cleaned(MathRows(GOOD[:1]), report, tmp_path / "clean.jsonl")


# -------------------- command line


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `longstraw audit` in this process: exit code, standard output, standard error on one line."""

    def run_it(*args):
        monkeypatch.setattr("sys.argv", ["longstraw", "audit", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return ended.value.code or 0, shown.out, " ".join(shown.err.split())

    return run_it


def test_the_command_audits_and_writes(run, tmp_path, chat_tokenizer):
    source = write_jsonl(tmp_path / "rows.jsonl", seeded_faults())
    chat_tokenizer.save_pretrained(tmp_path / "tokenizer")
    output = tmp_path / "clean.parquet"
    options = ["--tokenizer", tmp_path / "tokenizer", "--max-prompt-tokens", 100, "--output", output]
    code, shown, _ = run(source, *options, "--json")
    found = json.loads(shown)
    assert code == 1 and (found["n_rows"], found["n_kept"], found["n_rejected"]) == (11, 3, 8)
    assert found == json.loads((tmp_path / "clean.report.json").read_text())
    code, shown, error = run(source, *options)
    assert code == 2 and "exists; give another name, or overwrite=True (--overwrite)" in error and not shown
    assert run(source, *options, "--overwrite")[0] == 1
    code, shown, _ = run(output)
    assert code == 0 and "3 rows: 3 kept, 0 rejected." in shown


def test_the_command_prints_a_table(run, tmp_path):
    code, shown, _ = run(write_jsonl(tmp_path / "rows.jsonl", seeded_faults()))
    assert code == 1 and "11 rows: 4 kept, 7 rejected." in shown
    assert "unparsable" in shown and "too_long" not in shown
    (tmp_path / "other.jsonl").write_text('{"prompt": ["x"], "answer": "1"}')
    assert "prompt[0]" in run(tmp_path / "other.jsonl")[1]


def test_brackets_in_messages_are_shown(run, tmp_path, monkeypatch):
    def no_math_verify(*_):
        raise ConfigurationError('pip install "longstraw-sdk[math]"')

    monkeypatch.setattr("longstraw_sdk.data.audit_rows", no_math_verify)
    code, _, error = run(write_jsonl(tmp_path / "rows.jsonl", GOOD))
    assert code == 2 and 'pip install "longstraw-sdk[math]"' in error


def test_mistakes_of_the_command_end_with_code_2(run, tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", GOOD)
    for args, message in [
        (["nowhere.jsonl"], "does not exist"),
        ([source, "--max-prompt-tokens", "5"], "needs --tokenizer"),
        ([source, "--overwrite"], "needs --output"),
        ([source, "--tokenizer", tmp_path], "no tokenizer could be loaded"),
    ]:
        code, shown, error = run(*args)
        assert code == 2 and message in error and not shown
