"""Supervised warm-up of a fresh model, so that GRPO on long prompts has something to start from.

Two stages of all weights, on documents of 160 and 2,048 tokens, teach the model to find and say the answer. Then the
demonstrator gets unreliable and supervised training copies its rate, in the last layer's output projections alone: the
model can still find the answer but says it only sometimes. Trained on unreliable answers as a whole, it unlearns to
find them.

Indexers of sparse attention get no gradient from answers. Such a model learns with full attention, then its indexers
learn what that reads, then all other weights get used to reading no more than is selected (the two stages of
DeepSeek-V3.2, arXiv 2512.02556).
"""

import random
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch.optim import AdamW, Muon, Optimizer
from transformers import PreTrainedModel

from longstraw_sdk.demo.indexer import distil_indexers, full_attention, sharing_layers
from longstraw_sdk.demo.task import ANSWERS, CUE, FACT
from longstraw_sdk.demo.tokenizer import EOS_ID

N_QUESTIONS = 4  # per document: answers are dense, one question per document learns several times slower
N_RAMP_STEPS = 10
IGNORED = -100
LAST_BYTES = [letter.encode()[-1] for letter in ANSWERS]


@dataclass(frozen=True, kw_only=True)
class WarmUpStage:
    """Steps on `n_documents` documents of `n_tokens`, answered rightly at rate `demonstrator`, else by a random letter.

    Matrices between the embeddings and the head are trained by Muon, which gets there in half of AdamW's steps and on
    every seed tried, the rest by AdamW. The stage ends after `n_steps`, or when the running probability of the right
    answer reaches `pass_at`; without `pass_at` the learning rates fall to zero.
    """

    n_tokens: int
    n_documents: int
    n_steps: int
    learning_rate: float
    muon_learning_rate: float | None = None
    demonstrator: float = 1.0
    pass_at: float | None = None
    last_layer_only: bool = False
    sparse: bool = False


STAGES = (
    WarmUpStage(n_tokens=160, n_documents=25, n_steps=200, learning_rate=6e-3, muon_learning_rate=2e-2, pass_at=0.93),
    WarmUpStage(n_tokens=2048, n_documents=4, n_steps=60, learning_rate=4e-3, muon_learning_rate=1e-2),
    WarmUpStage(n_tokens=640, n_documents=6, n_steps=60, learning_rate=6e-3, demonstrator=0.25, last_layer_only=True),
)
SPARSE_STAGES = (
    STAGES[0],
    replace(STAGES[1], n_steps=40),
    replace(STAGES[1], n_documents=2, n_steps=30, sparse=True),
    replace(STAGES[2], n_tokens=1280, n_documents=3, sparse=True),
)
"""For models with indexers. At 640 tokens their selection leaves too little out to learn from."""


@dataclass(frozen=True)
class StageReport:
    """`right` is the running mean probability of the right answer to the first question of a training document."""

    n_tokens: int
    n_steps: int
    right: float


@dataclass(frozen=True)
class WarmUpReport:
    """One entry per stage, one per step that fitted indexers, and the wall-clock time of everything."""

    stages: tuple[StageReport, ...]
    indexer_divergences: tuple[float, ...]
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


def _batch(text: str, stage: WarmUpStage, rng: random.Random) -> _Batch:
    documents = [_document(text, stage.n_tokens, rng) for _ in range(stage.n_documents)]
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


def _optimizers(model: PreTrainedModel, stage: WarmUpStage) -> list[tuple[Optimizer, float]]:
    """Optimizers of what `stage` trains, each with its learning rate."""
    named = {k: p for k, p in model.named_parameters() if ".indexer." not in k}
    if stage.last_layer_only:
        last = f"model.layers.{model.config.num_hidden_layers - 1}."
        named = {k: p for k, p in named.items() if k.startswith(last) and ("o_proj" in k or "mlp" in k)}
    matrices = {k: p for k, p in named.items() if p.ndim == 2 and k.startswith("model.layers.")}
    if stage.muon_learning_rate is None:
        return [(_adamw(named.values()), stage.learning_rate)]
    others = [p for k, p in named.items() if k not in matrices]
    muon = Muon(matrices.values(), momentum=0.9, weight_decay=0.0)
    return [(muon, stage.muon_learning_rate), (_adamw(others), stage.learning_rate)]


def _adamw(parameters: Iterable[torch.nn.Parameter]) -> Optimizer:
    return AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.0)


def _run_stage(model: PreTrainedModel, text: str, stage: WarmUpStage, rng: random.Random) -> StageReport:
    optimizers = _optimizers(model, stage)
    trained = [p for optimizer, _ in optimizers for group in optimizer.param_groups for p in group["params"]]
    right, n_steps = 0.0, 0
    while n_steps < stage.n_steps and (stage.pass_at is None or right < stage.pass_at):
        decay = 1.0 if stage.pass_at is not None else 1.0 - n_steps / stage.n_steps
        n_steps += 1
        loss, accuracy = _loss_and_accuracy(model, _batch(text, stage, rng), stage.demonstrator)
        gradients = torch.autograd.grad(loss, trained)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for optimizer, learning_rate in optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate * decay * min(1.0, n_steps / N_RAMP_STEPS)
            optimizer.step()
        right = 0.8 * right + 0.2 * accuracy
    model.zero_grad()
    return StageReport(n_tokens=stage.n_tokens, n_steps=n_steps, right=right)


def stages_for(model: PreTrainedModel) -> tuple[WarmUpStage, ...]:
    return SPARSE_STAGES if sharing_layers(model) else STAGES


def warm_up(
    model: PreTrainedModel, text: str, seed: int = 0, stages: tuple[WarmUpStage, ...] | None = None
) -> WarmUpReport:
    """Trains `model` in place on documents cut from `text`: pass the training part of the prose, never the held-out.

    Indexers are fitted before the first `sparse` stage. `stages` is `stages_for(model)` if None.
    """
    began = time.perf_counter()
    rng = random.Random(f"warm-up/{seed}")
    model.train()
    reports = []
    divergences: tuple[float, ...] = ()
    for stage in stages_for(model) if stages is None else stages:
        if stage.sparse and not divergences:
            divergences = distil_indexers(model, lambda n_tokens: _answered(_document(text, n_tokens, rng)), rng)
        with nullcontext() if stage.sparse else full_attention(model):
            reports.append(_run_stage(model, text, stage, rng))
    model.eval()
    return WarmUpReport(stages=tuple(reports), indexer_divergences=divergences, seconds=time.perf_counter() - began)


def _answered(document: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
    """Token ids, and the positions that predict an answer."""
    ids, labels = document
    return ids, [i for i, label in enumerate(labels[1:]) if label != IGNORED]
