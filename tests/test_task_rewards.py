"""Rewards by hand, and as TRL calls them."""

import subprocess
import sys
import threading
import time

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from trl.rewards import accuracy_reward, get_soft_overlong_punishment
from trl_setup import our_trainer

from longstraw_sdk.data import answers
from longstraw_sdk.data.answers import answers_agree, final_answer
from longstraw_sdk.errors import InputError
from longstraw_sdk.trainers import dapo_math_reward, document_answer_reward, needle_recall_reward
from longstraw_sdk.trainers.rewards import checked_rewards


def as_chat(text):
    return [{"role": "assistant", "content": text}]


def math_reward(completion, right):
    """The reward of one completion, which must not depend on whether it is text or a conversation."""
    (text,), (chat,) = dapo_math_reward([completion], [right]), dapo_math_reward([as_chat(completion)], [right])
    assert text == chat
    return text


# -------------------- mathematics


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        (r"\boxed{34}", "34"),
        (r"So it is $\boxed{34}$. That was easy, and 35 is wrong.", "34"),
        (r"\boxed{0.5}", r"\frac12"),
        (r"\boxed{\frac12}", "0.5"),
        (r"\boxed{\dfrac{1}{2}}", "1/2"),
        (r"\boxed{\frac{\sqrt{8}}{2}}", r"\sqrt{2}"),
        (r"\boxed{\frac{1}{1+\frac{1}{2}}}", r"\frac{2}{3}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{1} then \boxed{2} and at last \boxed{3}", "3"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{x = 5}", "5"),
        (r"\boxed{1,234}", "1234"),
        (r"\boxed{034}", "34"),
        (r"\boxed{12\%}", r"12\%"),
        (r"\boxed{50^\circ}", "50"),
        (r"\boxed{(1, 2]}", "(1,2]"),
        (r"\boxed{\left(-\infty, 3\right]}", r"(-\infty,3]"),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}"),
        (r"\boxed{(x+1)^2}", "x^2+2x+1"),
        (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\boxed{\text{red}}", r"\text{red}"),
        (r"\boxed{2^{100}}", "1267650600228229401496703205376"),
        ("steps\nAnswer: 34", "34"),
        ("steps\n**Answer:** $34$.", "34"),
        ("steps\n**Answer**: 34", "34"),
        (r"Answer: \boxed{34}", "34"),
        ("I thought \\boxed{3}.\nAnswer: 4", "4"),
        ("Answer: 4\nno, \\boxed{3}", "3"),
        ("Answer: 1\nAnswer: 2", "2"),
        ("Answer:\n\\boxed{2}", "2"),
        ("\\boxed{2}\nAnswer: \n", "2"),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
    ],
)
def test_right_answers(completion, right):
    assert math_reward(completion, right) == 1.0


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("", "34"),
        ("34", "34"),
        ("the answer is 34", "34"),
        (r"\boxed{}", "34"),
        (r"\boxed{34", "34"),
        (r"\boxed{34} or rather \boxed{3", "34"),
        (r"\boxed{34} and then \boxed{35}", "34"),
        (r"\boxed{34, 35}", "34"),
        (r"\boxed{34 \text{ or } 35}", "34"),
        (r"\boxed{\frac{}", "34"),
        (r"\boxed{???}", "34"),
        (r"\boxed{0.33}", r"\frac13"),
        (r"\boxed{[1,2]}", "(1,2]"),
        (r"\boxed{-34}", "34"),
        ("Answer:", "34"),
        ("Answer:\n34", "34"),
        (r"\boxed{34" + "0" * 500 + "}", "34"),
    ],
)
def test_wrong_and_missing_answers(completion, right):
    assert math_reward(completion, right) == -1.0


@pytest.mark.parametrize("content", [None, "", []])
def test_a_conversation_without_text_is_wrong(content):
    assert dapo_math_reward([[{"role": "assistant", "content": content}], []], ["5", "5"]) == [-1.0, -1.0]


def test_the_last_message_and_its_parts_are_read():
    call = {"role": "assistant", "content": r"\boxed{4}"}
    parts = {"role": "assistant", "content": [{"type": "text", "text": r"\box"}, {"type": "text", "text": "ed{5}"}]}
    assert dapo_math_reward([[call, {"role": "tool", "content": "5"}, parts]], ["5"]) == [1.0]


@pytest.mark.parametrize(
    ("right", "fault"),
    [
        ("???", "'???' cannot be compared: math-verify finds no mathematics"),
        ("", "finds no mathematics"),
        ("hello world", "'hello' as a product of letters"),
        (5, "5 cannot be compared: it is not text"),
        (None, "it is not text"),
    ],
)
def test_a_right_answer_that_cannot_be_read_raises(right, fault):
    with pytest.raises(InputError) as caught:
        dapo_math_reward([r"\boxed{5}", r"\boxed{5}"], ["5", right])
    assert fault in str(caught.value) and "longstraw audit" in str(caught.value)


def test_as_many_answers_as_completions():
    for reward, answer in [(dapo_math_reward, "5"), (needle_recall_reward, ["5"]), (document_answer_reward, ["5"])]:
        with pytest.raises(ValueError, match="zip"):
            reward(["a", "b"], [answer])


RUNAWAYS = [
    "9^{9^{9^{9}}}",
    "100000000!",
    r"\binom{1000000000}{500000000}",
    "(x+1)^{100000}",
    "(x+y+z+w)^{50}",
    "e^{e^{e^{e^{e}}}}",
    r"\gcd(10^{100000000},6)",
    r"\Gamma(10^{9})",
    "((10^{1000})^{1000})^{1000}",
    r"\int_0^\infty \frac{\sin x^{17}}{x^{23}+e^x} dx",
    r"\prod_{k=1}^{1000000} k",
    "{" * 150 + "x" + "}" * 150,
    "(" * 150 + "1" + ")" * 150,
    "1+" * 190 + "1",
]


@pytest.mark.parametrize("in_thread", [False, True])
def test_no_answer_takes_long_in_any_thread(in_thread):
    """A thread other than the main one has no time limit to fall back on."""
    took = []

    def judge():
        answers._parsed.cache_clear()
        for given_answer in RUNAWAYS:
            began = time.perf_counter()
            reward = dapo_math_reward([rf"\boxed{{{given_answer}}}"], ["5"])
            took.append((time.perf_counter() - began, given_answer))
            assert reward == [-1.0]
        assert answers_agree("9^{9^{9^9}}", "9^{ 9^{9^9} }"), "what is not computed is compared as text"

    if in_thread:
        thread = threading.Thread(target=judge)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    else:
        judge()
    assert len(took) == len(RUNAWAYS)
    assert max(took)[0] < 4, max(took)


@pytest.mark.parametrize(
    "unit",
    ["a ", "\\", "{", "}", r"\boxed", r"\boxed{", r"\boxed{1} ", "answer ", "Answer: 1\n", "answer" + " " * 50, "\n"],
)
def test_a_very_long_completion_is_read_in_linear_time(unit):
    completion = unit * (2_000_000 // len(unit)) + r" \boxed{5}"
    began = time.perf_counter()
    assert dapo_math_reward([completion], ["5"]) == [1.0]
    assert time.perf_counter() - began < 3


@given(st.text(alphabet=st.sampled_from(list("\\{}boxed 15$.=,+^_()\n:Answer")), max_size=40))
def test_any_text_has_one_of_two_rewards(text):
    assert dapo_math_reward([text, text + r"\boxed{", text + r"\boxed{5}"], ["5"] * 3)[1:] == [-1.0, 1.0]
    assert dapo_math_reward([text], ["5"])[0] in (-1.0, 1.0)
    stated = final_answer(text + r"\boxed{7}")
    assert stated == "7"


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_whole_numbers_are_compared_as_such(right, given_number):
    reward = dapo_math_reward([rf"\boxed{{{given_number}}}", rf"\boxed{{{right}}}"], [str(right)] * 2)
    assert reward == [1.0 if right == given_number else -1.0, 1.0]


def test_it_agrees_with_trl_where_both_read_a_box():
    pairs = [
        ("1/2", "0.5"),
        ("3", "4"),
        (r"\frac{1}{3}", r"\frac{1}{2}"),
        ("(1,2)", "(1,2)"),
        (r"\sqrt{8}", r"2\sqrt{2}"),
    ]
    completions = [as_chat(rf"It is $\boxed{{{given_answer}}}$.") for _, given_answer in pairs]
    theirs = accuracy_reward(completions, [f"${right}$" for right, _ in pairs])
    assert dapo_math_reward(completions, [right for right, _ in pairs]) == [2 * reward - 1 for reward in theirs]


# -------------------- overlong shaping is TRL's


def test_overlong_shaping_of_trl_is_that_of_dapo():
    """Equation 13 of arXiv 2503.14476 with L_max = 20, L_cache = 8: nothing up to 12, then linear, -1 from 20 on."""
    (shaping,) = checked_rewards([get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=8)])
    lengths = [0, 1, 12, 13, 16, 19, 20, 21, 1000]
    found = shaping(prompts=[], completions=[], completion_ids=[[7] * n for n in lengths], answer=["5"] * len(lengths))
    assert found == [0, 0, 0, -1 / 8, -4 / 8, -7 / 8, -1, -1, -1]


def test_rewards_stand_beside_each_other_in_the_trainer(tmp_path):
    prompts = ["t5 t6 t7 t8 t9 t10 t11 t12 t13"] * 4
    dataset = Dataset.from_dict({"prompt": prompts, "answer": ["34"] * 4, "row": list(range(4))})
    rewards = [dapo_math_reward, get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=4)]
    trainer = our_trainer(tmp_path, dataset=dataset, reward=rewards, max_steps=1)
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "reward" in entry)
    assert logged["rewards/dapo_math_reward/mean"] == -1.0
    assert -1.0 <= logged["rewards/soft_overlong_punishment_reward/mean"] <= 0.0
    assert logged["reward"] == pytest.approx(-1.0 + logged["rewards/soft_overlong_punishment_reward/mean"])


# -------------------- needles


@pytest.mark.parametrize(
    ("completion", "asked", "reward"),
    [
        ("1234567", ["1234567"], 1.0),
        ("They are 1234567, 7654321.", ["7654321", "1234567"], 1.0),
        ("1234567,7654321", ["7654321", "1234567"], 1.0),
        ("1234567 only", ["7654321", "1234567"], 0.5),
        ("12345678", ["1234567"], 0.0),
        ("a1234567", ["1234567"], 0.0),
        ("_1234567", ["1234567"], 0.0),
        ("(1234567)", ["1234567"], 1.0),
        ("", ["1234567"], 0.0),
        ("red-owl", ["owl"], 1.0),
        ("the bowls", ["owl"], 0.0),
        ("A+B (x)", ["A+B", "(x)"], 1.0),
        ("it is βήτα!", ["βήτα"], 1.0),
        ("βήταx", ["βήτα"], 0.0),
        ("blue", "blue", 1.0),
    ],
)
def test_needle_recall(completion, asked, reward):
    assert needle_recall_reward([completion, as_chat(completion)], [asked, asked]) == [reward, reward]


# -------------------- documents


@pytest.mark.parametrize(
    ("completion", "right", "reward"),
    [
        ("the Eiffel Tower", ["Eiffel Tower"], 1.0),
        ("eiffel tower.", ["The Eiffel Tower!"], 1.0),
        ("tower", ["Eiffel Tower"], 2 / 3),  # precision 1, recall 1/2
        ("It is the Eiffel Tower", ["Eiffel Tower"], 2 / 3),  # precision 1/2, recall 1
        ("tower tower", ["Eiffel Tower"], 0.5),  # a word counts as often as both have it
        ("Louvre", ["Eiffel Tower"], 0.0),
        ("Louvre", ["Eiffel Tower", "the Louvre"], 1.0),
        ("", ["Eiffel Tower"], 0.0),
        ("the", ["a"], 1.0),  # nothing is left of either
        ("the", ["tower"], 0.0),
        ("1,000", ["1000"], 1.0),
        ("Athens", "Athens", 1.0),
    ],
)
def test_document_answers_as_squad_scores_them(completion, right, reward):
    assert document_answer_reward([completion, as_chat(completion)], [right, right]) == pytest.approx([reward] * 2)


@given(st.text(max_size=30), st.text(min_size=1, max_size=30).filter(str.strip))
def test_word_overlap_is_symmetric_bounded_and_one_for_the_same(one, other):
    assert document_answer_reward([other], [[other]]) == [1.0]
    (forth,) = document_answer_reward([one], [[other]])
    assert 0.0 <= forth <= 1.0
    if one.strip():
        assert document_answer_reward([other], [[one]]) == [forth]


@pytest.mark.parametrize("answer", [[], "", [""], None, 5, [5]])
def test_answer_columns_that_cannot_be_used(answer):
    for reward in (needle_recall_reward, document_answer_reward):
        with pytest.raises(InputError, match=r"the answer column has .*; allowed: text or a list of texts"):
            reward(["x"], [answer])


# -------------------- imports


def test_importing_data_and_rewards_is_light():
    heavy = ["trl", "datasets", "math_verify", "sympy.parsing", "transformers.tokenization_utils_base", "pyarrow"]
    code = (
        "import sys, longstraw_sdk; before = set(sys.modules)\n"
        "import longstraw_sdk.data, longstraw_sdk.trainers.task_rewards\n"
        f"print(sorted(set({heavy}) & (set(sys.modules) - before)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "[]", result.stderr


def test_without_math_verify_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['math_verify'] = None\n"
        "from longstraw_sdk.trainers import dapo_math_reward\n"
        r"dapo_math_reward([r'\boxed{5}'], ['5'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert 'ConfigurationError: comparing answers needs math-verify: pip install "longstraw-sdk[math]"' in result.stderr
