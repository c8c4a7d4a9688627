"""Long-context tasks from a folder of text: lengths, places, determinism, splits, awkward files."""

import json
import random
from pydoc_data.topics import topics

import pytest
from datasets import Value
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from longstraw_sdk.data import NeedleTask, document_qa_dataset, needle_dataset, read_corpus
from longstraw_sdk.data.documents import Document, Piece, document_paths, split_of
from longstraw_sdk.data.needles import FACT, QUESTION, Needle, with_needles
from longstraw_sdk.data.tokens import fit_prompt, prompt_ids
from longstraw_sdk.demo.tokenizer import byte_tokenizer
from longstraw_sdk.errors import ConfigurationError, InputError

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
TEXTS = {name: text for name, text in sorted(topics.items()) if 500 < len(text) < 6000}


def byte_level_bpe():
    """Merges and white space inside tokens, as Qwen and Llama 3 have them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXTS.values(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def whole_text_bpe():
    """Tokens may span words and line ends, and a mark is put before the text, as in SentencePiece models."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    pieces = [text[i : i + 80] for text in TEXTS.values() for i in range(0, len(text), 80)]
    tokenizer.train_from_iterator(pieces, trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>"]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("documents")
    for i, (name, text) in enumerate(TEXTS.items()):
        path = root / ("deep/er" if i % 3 else ".") / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.fixture(scope="module", params=["bytes", "byte_level_bpe", "whole_text_bpe"])
def tokenizer(request):
    made = {"bytes": byte_tokenizer, "byte_level_bpe": byte_level_bpe, "whole_text_bpe": whole_text_bpe}[
        request.param
    ]()
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def corpus(folder, tokenizer):
    return read_corpus(folder, tokenizer)


@pytest.fixture(scope="module")
def byte_corpus(folder):
    return read_corpus(folder, byte_tokenizer())


def tiny_folder(root, **files):
    for name, content in files.items():
        (root / f"{name}.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def haystack(prompt):
    text = prompt if isinstance(prompt, str) else prompt[0]["content"]
    found = text.rpartition(QUESTION.partition("{")[0])
    assert found[1], "the question is there"
    return found[0]


# -------------------- needles


@pytest.mark.parametrize("conversational", [False, True])
def test_needles_are_in_the_decoded_prompt_once_and_lengths_hold(corpus, tokenizer, conversational):
    task = NeedleTask(n_needles=5, n_asked=2)
    rows = needle_dataset(corpus, task, prompt_tokens=(1500, 1560), n_prompts=8, conversational=conversational)
    assert len(rows) == 8 and len(set(rows["n_prompt_tokens"])) > 1
    prompt_type = rows.features["prompt"].feature["content"] if conversational else rows.features["prompt"]
    assert prompt_type == Value("large_string"), "2 GiB of prompts are no limit"
    for row in rows:
        ids = prompt_ids(row["prompt"], tokenizer)
        assert 1500 <= len(ids) == row["n_prompt_tokens"] <= 1560
        decoded = tokenizer.decode(ids)
        text = haystack(row["prompt"])
        assert len(row["answer"]) == len(row["keys"]) == len(set(row["answer"])) == 2
        for key, value in zip(row["keys"], row["answer"], strict=True):
            assert text.count(FACT.format(key=key, value=value)) == 1 == decoded.count(f"{key}: {value}")
        assert sum(": " in line and line[-7:].isdigit() and "-" in line for line in text.splitlines()) == 5


@pytest.mark.parametrize("n_tokens", [700, 701, 1111])
def test_an_exact_length_is_met(corpus, tokenizer, n_tokens):
    rows = needle_dataset(corpus, prompt_tokens=(n_tokens, n_tokens), n_prompts=4, seed=n_tokens)
    assert [len(prompt_ids(prompt, tokenizer)) for prompt in rows["prompt"]] == [n_tokens] * 4


def test_the_filler_is_text_of_the_folder_in_pieces_without_loss(corpus):
    (row,) = needle_dataset(corpus, NeedleTask(3), prompt_tokens=(3000, 3050), n_prompts=1)
    text = haystack(row["prompt"])
    for line in [line for line in text.splitlines() if line[-7:].isdigit() and "-" in line]:
        text = text.replace(f"\n\n{line}\n\n", "")
    sources = list(TEXTS.values())
    n_found = 0
    while text:  # greedily: the longest start of the rest that is in one of the documents
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if any(text[:middle] in s for s in sources) else (low, middle - 1)
        assert low > 0, text[:40]
        text, n_found = text[low:].removeprefix("\n\n"), n_found + 1
    assert n_found <= 14, "documents and nothing else"


def test_places_are_uniform_and_are_where_the_needles_are(byte_corpus):
    rows = needle_dataset(byte_corpus, NeedleTask(1), prompt_tokens=(900, 1000), n_prompts=400)
    found = []
    for row in rows:
        text = haystack(row["prompt"])
        fact = FACT.format(key=row["keys"][0], value=row["answer"][0])
        before = len(text.partition(fact)[0].encode()) / (len(text.encode()) - len(fact))
        assert abs(before - row["places"][0]) < 0.01  # joints of documents count on one side only
        found.append(before)
    quarters = [sum(i / 4 <= place < (i + 1) / 4 for place in found) for i in range(4)]
    assert all(60 <= n <= 140 for n in quarters), quarters  # 100 each, five standard deviations of 8.7
    assert min(found) < 0.02 and max(found) > 0.98


def test_rows_depend_on_the_arguments_alone(byte_corpus, folder, tmp_path):
    def rows(corpus, **options):
        return needle_dataset(corpus, **({"prompt_tokens": (800, 900), "n_prompts": 3} | options)).to_list()

    first = rows(byte_corpus)
    random.seed(99)
    assert rows(byte_corpus) == first
    assert rows(byte_corpus, n_prompts=5)[:3] == first, "a prompt does not depend on how many follow"
    assert rows(byte_corpus, seed=1) != first
    for path in sorted(folder.rglob("*.txt"), reverse=True):  # another folder, written in another order
        copy = tmp_path / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert rows(read_corpus(tmp_path, byte_tokenizer())) == first


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=4),
)
def test_needles_go_between_the_tokens_that_their_places_say(lengths, places):
    pieces = []
    for i, n in enumerate(lengths):
        text = "abcdefghi"[:n] if i % 2 else "ABCDEFGHI"[:n]
        pieces.append(Piece(Document(str(i), text, list(range(n + 1))), 0, n))
    needles = [Needle(f"k{i}", f"v{i}", place) for i, place in enumerate(places)]
    plain = "".join(piece.document.text for piece in pieces)
    text = with_needles(pieces, needles, len(plain))
    facts = {needle.key: FACT.format(key=needle.key, value=needle.value) for needle in needles}
    assert all(text.count(fact) == 1 for fact in facts.values())
    for needle in needles:
        before = text.partition(facts[needle.key])[0]
        for fact in facts.values():
            before = before.replace(fact, "")
        n_before = len(before.replace("\n", ""))
        assert n_before == int(needle.place * (len(plain) + 1))
    for fact in facts.values():
        text = text.replace(fact, "")
    assert text.replace("\n", "") == plain


def test_text_that_holds_every_needle_is_refused(tmp_path):
    from longstraw_sdk.data import needles

    names = "\n".join(f"{a}-{b}" for a in needles._FIRST for b in needles._SECOND)
    corpus = read_corpus(tiny_folder(tmp_path, names=names), byte_tokenizer())
    with pytest.raises(InputError, match="use other text"):
        needle_dataset(corpus, prompt_tokens=(1400, 1450), n_prompts=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_tokens": (10, 5)}, "least <= most, got"),
        ({"prompt_tokens": (0, 5)}, "least <= most, got"),
        ({"prompt_tokens": 500}, "least <= most, got 500"),
        ({"n_prompts": 0}, "n_prompts must be an integer of at least 1"),
        ({"conversational": True}, "has no chat template"),
    ],
)
def test_options_of_needles_that_cannot_work(byte_corpus, options, message):
    with pytest.raises(ConfigurationError, match=message):
        needle_dataset(byte_corpus, **({"prompt_tokens": (800, 900), "n_prompts": 1} | options))


@pytest.mark.parametrize(
    "options", [{"n_needles": 0}, {"n_asked": 0}, {"n_needles": 2, "n_asked": 3}, {"n_needles": 999}]
)
def test_tasks_that_cannot_be_set(options):
    with pytest.raises(ConfigurationError, match=r"n_needles|n_asked"):
        NeedleTask(**options)


def test_lengths_that_cannot_be_met(byte_corpus):
    with pytest.raises(InputError, match="too few for one prompt; add documents or lower prompt_tokens"):
        needle_dataset(byte_corpus, prompt_tokens=(10**7, 10**7 + 100), n_prompts=1)
    with pytest.raises(InputError, match="before any filler, but prompt_tokens allows 60"):
        needle_dataset(byte_corpus, prompt_tokens=(50, 60), n_prompts=1)


def test_a_length_that_no_cut_gives_is_reported_after_few_tries():
    lengths = []

    def build(n_filler, n_first):
        lengths.append(n_filler)
        return "a" * (n_filler if n_filler <= 100 else n_filler + 1)  # 101 is never reached

    assert fit_prompt(build, byte_tokenizer(), (101, 101), 101) is None
    assert len(lengths) == len(set(lengths)) <= 10
    assert fit_prompt(build, byte_tokenizer(), (101, 102), 102) == ("a" * 102, 102)


def test_the_whole_prompt_is_tokenised_few_times(byte_corpus, monkeypatch):
    counted = []

    def count(prompt, tokenizer):
        counted.append(len(prompt))
        return prompt_ids(prompt, tokenizer)

    monkeypatch.setattr("longstraw_sdk.data.tokens.prompt_ids", count)
    needle_dataset(byte_corpus, prompt_tokens=(20_000, 20_400), n_prompts=5)
    assert sum(n > 10_000 for n in counted) == 5 and len(counted) == 10


# -------------------- questions about documents


def write_questions(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ask(name, question="What is said?", answer="this"):
    return {"document": name, "question": question, "answer": answer}


@pytest.mark.parametrize("conversational", [False, True])
def test_the_document_is_whole_among_others(corpus, tokenizer, folder, tmp_path, conversational):
    names = [document.name for document in corpus.documents][:6]
    path = write_questions(tmp_path / "q.jsonl", [ask(name, f"Q{i}?", ["a", "b"]) for i, name in enumerate(names)])
    least = max(document.n_tokens for document in corpus.documents[:6]) + 1500
    rows = document_qa_dataset(corpus, path, prompt_tokens=(least, least + 60), conversational=conversational)
    starts = []
    for i, (name, row) in enumerate(zip(names, rows, strict=True)):
        n_tokens = len(prompt_ids(row["prompt"], tokenizer))
        assert least <= n_tokens == row["n_prompt_tokens"] <= least + 60
        assert (row["document"], row["question"], row["answer"]) == (name, f"Q{i}?", ["a", "b"])
        text = row["prompt"][0]["content"] if conversational else row["prompt"]
        whole = f"Document: {name}\n\n{(folder / name).read_text()}\n\n"
        assert text.count(whole) == 1 and text.count("Document: ") > 1
        assert text.rstrip().endswith(f"Question: Q{i}?\nAnswer in as few words as possible.")
        starts.append(text.index(whole))
    assert len(set(starts)) > 1, "not always in one place"
    assert document_qa_dataset(corpus, path, prompt_tokens=(least, least + 60), conversational=conversational)[
        "prompt"
    ] == list(rows["prompt"])


def test_questions_go_with_their_split(folder, tmp_path):
    names = list(document_paths(folder))
    path = write_questions(tmp_path / "q.jsonl", [ask(name) for name in names])
    asked, shown = {}, {}
    for split in ("train", "held_out"):
        corpus = read_corpus(folder, byte_tokenizer(), split=split)
        rows = document_qa_dataset(corpus, path, prompt_tokens=(7000, 12_000))
        asked[split] = set(rows["document"])
        shown[split] = {
            line for prompt in rows["prompt"] for line in prompt.splitlines() if line.startswith("Document: ")
        }
        assert asked[split] == {document.name for document in corpus.documents}
    assert asked["train"] | asked["held_out"] == set(names) and not asked["train"] & asked["held_out"]
    assert not shown["train"] & shown["held_out"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: line 1 is not JSON"),
        ("[]", "line 1: document must be text, got None"),
        (json.dumps(ask("a.txt") | {"document": 5}), "document must be text, got 5"),
        (json.dumps(ask("a.txt", question=" ")), "question must be text, got ' '"),
        (json.dumps(ask("a.txt", answer=[])), r"answer must be text or a list of texts, got \[\]"),
        (json.dumps(ask("a.txt", answer=["x", ""])), "answer must be text or a list"),
        (json.dumps(ask("gone.txt")), r"line 1: the document 'gone\.txt' is not in"),
        (json.dumps(ask("a.txt")), r"the question about 'a\.txt' .* cannot be asked in 1000 to 1010 tokens: .*too few"),
        ("", "has no question about the 1 documents"),
    ],
)
def test_questions_that_cannot_be_asked(tmp_path, line, message):
    (tmp_path / "docs").mkdir()
    corpus = read_corpus(tiny_folder(tmp_path / "docs", a="short"), byte_tokenizer())
    path = tmp_path / "q.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match=message):
        document_qa_dataset(corpus, path, prompt_tokens=(1000, 1010))


def test_a_document_too_long_to_be_whole_is_refused(byte_corpus, tmp_path):
    name = byte_corpus.documents[0].name
    path = write_questions(tmp_path / "q.jsonl", [ask(name)])
    with pytest.raises(InputError, match=f"about '{name}'.* cannot be asked in 100 to 200 tokens: the prompt needs"):
        document_qa_dataset(byte_corpus, path, prompt_tokens=(100, 200))
    with pytest.raises(InputError, match="is not a file"):
        document_qa_dataset(byte_corpus, tmp_path / "none.jsonl", prompt_tokens=(100, 200))


# -------------------- folders


def test_text_is_the_same_whatever_wrote_it(tmp_path):
    tiny_folder(tmp_path, bom=b"\xef\xbb\xbfa\r\nb", mac="a\rb", unix="a\nb", empty="", unicode="βé漢🙂 x")
    corpus = read_corpus(tmp_path, byte_tokenizer())
    texts = {document.name: document.text for document in corpus.documents}
    assert list(texts) == ["bom.txt", "empty.txt", "mac.txt", "unicode.txt", "unix.txt"]
    assert texts["bom.txt"] == texts["mac.txt"] == texts["unix.txt"] == "a\nb" and texts["empty.txt"] == ""
    assert [document.n_tokens for document in corpus.documents] == [3, 0, 3, len("βé漢🙂 x".encode()), 3]
    unicode = corpus.documents[3]
    for cut in range(unicode.n_tokens + 1):
        assert unicode.between(0, cut) + unicode.between(cut, unicode.n_tokens) == unicode.text


def test_tokens_of_a_document_give_its_text_back(corpus):
    for document in corpus.documents[:10]:
        cuts = range(0, document.n_tokens + 1, 7)
        pieces = [document.between(a, b) for a, b in zip(cuts, [*cuts[1:], document.n_tokens], strict=True)]
        assert "".join(pieces) == document.text


def test_names_are_relative_sorted_and_composed(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("b/a.txt", "a.md", "B.txt", "cafe\u0301.TXT"):
        (tmp_path / name).write_text("x")
    assert list(document_paths(tmp_path)) == ["B.txt", "a.md", "b/a.txt", "caf\u00e9.TXT"]
    assert list(document_paths(tmp_path, suffixes=[".txt"])) == ["B.txt", "b/a.txt", "caf\u00e9.TXT"]
    (tmp_path / "caf\u00e9.TXT").write_text("x")
    with pytest.raises(InputError, match="have one name in composed Unicode"):
        document_paths(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfea", r"bad\.bin is not UTF-8 text"), (b"a\0b", r"bad\.bin has NUL characters")],
)
def test_files_that_are_not_text_are_named_unless_not_chosen(tmp_path, content, message):
    tiny_folder(tmp_path, good="text")
    (tmp_path / "bad.bin").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_corpus(tmp_path, byte_tokenizer())
    assert len(read_corpus(tmp_path, byte_tokenizer(), suffixes=[".txt"]).documents) == 1


def test_links_that_leave_the_folder_are_refused(tmp_path):
    root = tmp_path / "docs"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("outside")
    tiny_folder(root, a="text")
    (root / "again.txt").symlink_to("a.txt")
    (root / "sub" / "up").symlink_to("../sub")
    assert list(document_paths(root)) == ["a.txt"]
    for target in (tmp_path / "secret.txt", tmp_path, root / "gone.txt"):
        link = root / "sub" / "link.txt"
        link.symlink_to(target)
        with pytest.raises(InputError, match=r"link\.txt leads out of"):
            document_paths(root)
        link.unlink()


def test_folders_that_cannot_be_read(tmp_path):
    tokenizer = byte_tokenizer()
    with pytest.raises(InputError, match="has no file"):
        read_corpus(tmp_path, tokenizer)
    tiny_folder(tmp_path, a="", b=" ")
    with pytest.raises(InputError, match=r"has no file that ends in \.md"):
        read_corpus(tmp_path, tokenizer, suffixes=[".md"])
    with pytest.raises(InputError, match="is not a folder"):
        read_corpus(tmp_path / "a.txt", tokenizer)
    for suffixes in (".txt", ["txt"]):
        with pytest.raises(ConfigurationError, match="a sequence such as"):
            read_corpus(tmp_path, tokenizer, suffixes=suffixes)
    with pytest.raises(ConfigurationError, match="'test'; allowed: train, held_out"):
        read_corpus(tmp_path, tokenizer, split="test")
    with pytest.raises(ConfigurationError, match="use a fast tokenizer"):
        read_corpus(tmp_path, object())
    (tmp_path / "b.txt").unlink()
    with pytest.raises(InputError, match="are empty; add text"):
        needle_dataset(read_corpus(tmp_path, tokenizer), prompt_tokens=(500, 600), n_prompts=1)


def test_splits_share_no_document_and_are_about_80_to_20(folder):
    parts = {
        split: {document.name for document in read_corpus(folder, byte_tokenizer(), split=split).documents}
        for split in ("train", "held_out", None)
    }
    assert parts["train"] | parts["held_out"] == parts[None] and not parts["train"] & parts["held_out"]
    n_held_out = sum(split_of(f"{i}.txt") == "held_out" for i in range(2000))
    assert 310 <= n_held_out <= 490  # 400, five standard deviations of 18
    known = {"a.txt": "held_out", "b.txt": "train", "c.txt": "train", "deep/d.txt": "train"}
    assert {name: split_of(name) for name in known} == known, "on every machine"


def test_needles_of_a_split_lie_in_its_documents_alone(folder):
    everything = read_corpus(folder, byte_tokenizer()).documents
    for split in ("train", "held_out"):
        corpus = read_corpus(folder, byte_tokenizer(), split=split)
        others = [document.text for document in everything if split_of(document.name) != split]
        for prompt in needle_dataset(corpus, prompt_tokens=(4000, 5000), n_prompts=10)["prompt"]:
            text = haystack(prompt)
            windows = [text[i : i + 100] for i in range(0, len(text) - 100, 100)]
            assert sum(any(w in document.text for document in corpus.documents) for w in windows) > len(windows) // 2
            assert sum(any(w in other for other in others) for w in windows) <= 2, "topics quote each other"
