"""Supervised warm-up of all base weights on short documents, so that GRPO on long ones has something to start from.

Documents of 160 and 640 tokens teach the model to find and say the answer. Then the demonstrator gets unreliable, and
supervised training copies its rate: the model can find the answer but says it only sometimes. The rate falls in two
stages because a confident model that meets unreliable demonstrations at once unlearns retrieval altogether.
"""

import random
import time
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from longstraw_sdk.demo.task import ANSWERS, CUE, FACT
from longstraw_sdk.demo.tokenizer import EOS_ID

STEP_TOKENS = 4096
N_QUESTIONS = 4  # per document: answers are dense, one question per document learns several times slower
N_RAMP_STEPS = 20
IGNORED = -100
LAST_BYTES = [letter.encode()[-1] for letter in ANSWERS]


@dataclass(frozen=True, kw_only=True)
class WarmUpStage:
    """Documents of `n_tokens`, answered rightly at rate `demonstrator` and by a uniformly random letter otherwise.

    The stage ends when the running probability of the right answer reaches `pass_ratio * demonstrator`.
    """

    n_tokens: int
    demonstrator: float
    learning_rate: float
    max_steps: int
    min_steps: int = 0
    pass_ratio: float = 0.85


STAGES = (
    WarmUpStage(n_tokens=160, demonstrator=1.0, learning_rate=6e-3, max_steps=200, pass_ratio=0.93),
    WarmUpStage(n_tokens=640, demonstrator=1.0, learning_rate=2e-3, min_steps=25, max_steps=40, pass_ratio=0.97),
    WarmUpStage(n_tokens=320, demonstrator=0.5, learning_rate=2e-3, min_steps=20, max_steps=20),
    WarmUpStage(n_tokens=1024, demonstrator=0.33, learning_rate=1e-3, min_steps=20, max_steps=20),
)
"""Documents stay short: stages of 1,536 and 4,096 tokens, one document a step, made retrieval at 4,000 worse."""


@dataclass(frozen=True)
class StageReport:
    """`right` is the running mean probability of the right answer to the first question of a training document."""

    n_tokens: int
    n_steps: int
    right: float


@dataclass(frozen=True)
class WarmUpReport:
    """One entry per stage, and the wall-clock time of all of them."""

    stages: tuple[StageReport, ...]
    seconds: float


@dataclass(frozen=True)
class _Batch:
    input_ids: torch.Tensor  # [B, T]
    labels: torch.Tensor  # [B, T], IGNORED outside of answers and ends of sequence


def _document(text: str, n_tokens: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """One document with the fact once and `N_QUESTIONS` answered cues behind it, the last one at the end."""
    answer = rng.choice(ANSWERS)
    fact, cue = list(FACT.format(answer=answer).encode()), list(CUE.encode())
    response = [*answer.encode(), EOS_ID]
    n_prose = n_tokens - len(fact) - N_QUESTIONS * (len(cue) + len(response))
    start = rng.randrange(len(text) - n_prose)
    prose = text[start : start + n_prose].encode()
    cuts = sorted(rng.randrange(n_prose + 1) for _ in range(N_QUESTIONS))
    ids = [*prose[: cuts[0]], *fact]
    labels = [IGNORED] * len(ids)
    for begin, end in zip(cuts, [*cuts[1:], n_prose], strict=True):
        ids += [*prose[begin:end], *cue, *response]
        labels += [IGNORED] * (end - begin + len(cue)) + response
    return ids, labels


def _batch(text: str, n_tokens: int, rng: random.Random) -> _Batch:
    """`STEP_TOKENS` tokens of documents of `n_tokens` each."""
    documents = [_document(text, n_tokens, rng) for _ in range(max(1, STEP_TOKENS // n_tokens))]
    return _Batch(torch.tensor([ids for ids, _ in documents]), torch.tensor([labels for _, labels in documents]))


def _loss_and_accuracy(model: PreTrainedModel, batch: _Batch, demonstrator: float) -> tuple[torch.Tensor, float]:
    """Expected cross-entropy under the demonstrator, and the mean probability of the right answer.

    With probability `1 - demonstrator` the demonstrator says a uniformly random letter; the expectation over that
    choice is taken in closed form. Letters differ in their last byte only, so that byte alone is uncertain.
    """
    labels = batch.labels[:, 1:]
    asked = labels != IGNORED
    hidden = model.model(batch.input_ids).last_hidden_state[:, :-1]
    logprobs = model.lm_head(hidden[asked]).log_softmax(-1)  # [N, V]
    right = logprobs.gather(-1, labels[asked][:, None])[:, 0]
    uncertain = torch.isin(labels[asked], torch.tensor(LAST_BYTES))
    letters = logprobs[:, LAST_BYTES].mean(-1)
    expected = torch.where(uncertain, demonstrator * right + (1 - demonstrator) * letters, right)
    return -expected.mean(), right[uncertain].detach().exp().view(-1, N_QUESTIONS)[:, 0].mean().item()


def warm_up(model: PreTrainedModel, text: str, seed: int = 0, stages: tuple[WarmUpStage, ...] = STAGES) -> WarmUpReport:
    """Trains `model` in place on documents cut from `text`: pass the training part of the prose, never the held-out."""
    began = time.perf_counter()
    rng = random.Random(f"warm-up/{seed}")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    n_steps = 0
    reports = []
    model.train()
    for stage in stages:
        right, n_stage_steps = 0.0, 0
        while n_stage_steps < stage.max_steps and (
            n_stage_steps < stage.min_steps or right < stage.pass_ratio * stage.demonstrator
        ):
            n_steps, n_stage_steps = n_steps + 1, n_stage_steps + 1
            optimizer.param_groups[0]["lr"] = stage.learning_rate * min(1.0, n_steps / N_RAMP_STEPS)
            loss, accuracy = _loss_and_accuracy(model, _batch(text, stage.n_tokens, rng), stage.demonstrator)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            right = 0.8 * right + 0.2 * accuracy
        reports.append(StageReport(n_tokens=stage.n_tokens, n_steps=n_stage_steps, right=right))
    model.eval()
    return WarmUpReport(stages=tuple(reports), seconds=time.perf_counter() - began)
