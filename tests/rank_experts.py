"""What the ranks of a `RankPool` run where experts are spread over them. They return plain values."""

import copy
import dataclasses
import hashlib
import importlib
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from rank_cases import dist_size, rank, said, tokens
from torch import distributed as dist

from longstraw_sdk import LongStrawSession
from longstraw_sdk.backends import AccelerateBackend, accelerate
from longstraw_sdk.evidence.float64 import float64_upcasts
from longstraw_sdk.evidence.parity import (
    ParityCase,
    _cast,
    _compare,
    _draw,
    _gradients,
    conventional_run,
    relative_l2,
    replay_run,
)
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.lora import base_model_of
from longstraw_sdk.models.glm52 import GLM52Adapter, expert_shards, experts
from longstraw_sdk.models.glm52 import adapter as glm_adapter
from longstraw_sdk.models.glm52.expert_shards import keep_expert_shard, load_expert_shard

expert_exchange = importlib.import_module("longstraw_sdk.ops.expert_exchange")


def whole_model(**options):
    """Six layers, four of them with eight experts, and LoRA on everything."""
    return tiny_model("glm52", **{"n_layers": 6, **options})


def one_by_one(calls):
    """The results of `calls` on every rank, each of which one rank makes."""
    own = calls[rank()]() if rank() < len(calls) else None
    found = [None] * dist_size()
    dist.all_gather_object(found, own)
    return found[: len(calls)]


def own_part(model, expert_size):
    return keep_expert_shard(copy.deepcopy(model), rank() % expert_size, expert_size)


def parity(context_size, expert_size, case, fault=None, other_prompts=False, **options):
    """ParityResult of a spread model against conventional autograd of the whole one, whose mean over contexts it is."""
    case = dataclasses.replace(case, context_parallel_size=context_size, expert_parallel_size=expert_size)
    n_contexts = dist_size() // context_size
    cases = [dataclasses.replace(case, seed=i * other_prompts) for i in range(n_contexts)]
    if other_prompts:  # lengths differ too
        cases = [dataclasses.replace(c, prompt_tokens=c.prompt_tokens - 7 * i) for i, c in enumerate(cases)]
    own = rank() // context_size
    model, adapter = whole_model(**{"n_layers": 4, **options}), GLM52Adapter()
    with float64_upcasts() if case.dtype == "float64" else nullcontext(), pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            FAULTS[fault](patch)
        part = own_part(_cast(model, case.dtype), expert_size)
        found = replay_run(part, cases[own], adapter)
        found = dataclasses.replace(found, gradients=adapter.gather_shards(base_model_of(part), found.gradients))
        references = one_by_one([partial(conventional_run, _cast(model, case.dtype), c, GLM52Adapter()) for c in cases])
    names = references[0].gradients
    mean = {n: torch.stack([r.gradients[n] for r in references]).mean(0) for n in names}
    return _compare(case, found, dataclasses.replace(references[own], gradients=mean), 0.0)


def deep_parity(context_size, expert_size, case):
    return parity(context_size, expert_size, case, n_layers=6)


def _over_the_context(patch):
    """Experts are reduced as everything else is."""
    patch.setattr(accelerate, "is_shared", lambda p: True)


def _copies_not_summed(patch):
    reduce = accelerate.reduce_over

    def broken(parameters, group, divisor):
        return reduce(parameters[:0] if group.name == "expert copies" else parameters, group, divisor)

    patch.setattr(accelerate, "reduce_over", broken)


def _averaged(patch):
    reduce = accelerate.reduce_over

    def broken(parameters, group, divisor):
        return reduce(parameters, group, group.size)

    patch.setattr(accelerate, "reduce_over", broken)


def _expert_major_b(patch):
    """LoRA B cut as if the experts came first in it, as they do in A."""
    cut = expert_shards._cut

    def broken(matrix, whole, n_experts, own):
        if matrix == "A":
            return cut(matrix, whole, n_experts, own)
        return whole.unflatten(1, (n_experts, -1))[:, own].flatten(1).clone()

    patch.setattr(expert_shards, "_cut", broken)


def _not_marked(patch):
    patch.setattr(glm_adapter, "mark_expert_shards", lambda model: None)


def _gradients_stay(patch):
    """Gradients of rows that came from other ranks do not go back."""

    def broken(ctx, *grad_outputs):
        found = backward(ctx, *grad_outputs)
        return found[0] * 0, *found[1:]

    backward = expert_exchange._Exchange.backward
    patch.setattr(expert_exchange._Exchange, "backward", staticmethod(broken))


def _not_divided(patch):
    sound = AccelerateBackend.__init__

    def broken(self, *sizes, **options):
        sound(self, *sizes, **options)
        self.n_contexts = 1

    patch.setattr(AccelerateBackend, "__init__", broken)


FAULTS = {
    "experts summed over the context": _over_the_context,
    "copies of experts not summed": _copies_not_summed,
    "gradient averaged over the context": _averaged,
    "LoRA B cut expert by expert": _expert_major_b,
    "experts not marked": _not_marked,
    "not divided by the contexts": _not_divided,
    "gradients do not travel back": _gradients_stay,
}


def routed_to_few(context_size, expert_size, case):
    """`parity` where the router takes two experts of one rank only, and the rows that each rank got."""
    received = []
    run = experts._run_experts

    def counted(factors, module, rows, counts):
        received.append(len(rows))
        return run(factors, module, rows, counts)

    def biased(**options):
        model = tiny_model("glm52", **{"n_layers": 4, **options})
        for module in model.modules():
            if hasattr(module, "e_score_correction_bias"):
                module.e_score_correction_bias.data[:2] = 100.0
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "whole_model", biased)
        patch.setattr(experts, "_run_experts", counted)
        return parity(context_size, expert_size, case), sum(received), len(received)


def two_steps(context_size, expert_size, lr=0.05):
    """Loss per step, the adapter after two steps, whole, and a digest of it; prompts and rows of uneven lengths."""
    model, adapter = whole_model(n_layers=4), GLM52Adapter()
    part = own_part(model, expert_size) if dist_size() > 1 else model
    optimizer = torch.optim.AdamW([p for p in part.parameters() if p.requires_grad], lr=lr, eps=1e-3)
    sizes = {"context_parallel_size": context_size, "expert_parallel_size": expert_size}
    losses = []
    with float64_upcasts():
        part.double()
        with LongStrawSession(part, adapter, chunk_tokens=16, page_tokens=8, **sizes) as session:
            for step in range(2):
                with session.capture(tokens(40 + step, seed=step)) as prefix:
                    for n in (5, 1, 3):
                        loss = prefix.replay(tokens(n, seed=10 * step + n)).logps.mean()
                        loss.backward()
                        losses.append(float(loss.detach()))
                session.finalize()
                optimizer.step()
                optimizer.zero_grad()
            named = {n: p.detach() for n, p in part.named_parameters() if p.requires_grad}
            whole = adapter.gather_shards(base_model_of(part), named)
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in whole.values())).hexdigest()
    return losses, torch.cat([t.flatten() for t in whole.values()]), digest


def sampled(context_size, expert_size):
    """Rows drawn from a seed, and what a stock forward of the bound model says of them."""
    model = whole_model(n_layers=4)
    part = own_part(model, expert_size) if dist_size() > 1 else model
    sizes = {"context_parallel_size": context_size, "expert_parallel_size": expert_size}
    with LongStrawSession(part, chunk_tokens=16, page_tokens=8, **sizes) as session:
        with session.capture(tokens(37)) as prefix:
            rows = prefix.sample(3, max_new_tokens=6, seed=1)
            scores = prefix.score(rows)
    return [row.tolist() for row in rows], torch.cat(scores)


# --- contexts that share experts ---


def uneven_work(context_size, expert_size, scope="full", idle=False, fault=None, dtype=torch.float64):
    """Relative L2 of the gradient to the mean of conventional ones, over contexts with prompts, lengths, numbers of
    responses and draws of their own; with `idle` the last context has nothing to do.
    """
    n_contexts, own = dist_size() // context_size, rank() // context_size
    mode = {"frozen": ("full", "frozen")}.get(scope, (scope, "live"))
    lengths = [(3, 1), (5,), (2, 6, 4), (7,)]
    cases = [
        ParityCase("float64", *mode, prompt_tokens=20 + 13 * i, response_tokens=lengths[i], seed=i)
        for i in range(n_contexts)
    ]
    model, adapter = whole_model(n_layers=4), GLM52Adapter()
    sizes = {"context_parallel_size": context_size, "expert_parallel_size": expert_size}
    with float64_upcasts(), pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            FAULTS[fault](patch)
        part = own_part(model.to(dtype), expert_size)
        prompt, rows, weights = _draw(part, cases[own])
        with LongStrawSession(
            part, adapter, gradient_scope=mode[0], prefix_adapter=mode[1], chunk_tokens=16, page_tokens=8, **sizes
        ) as session:
            if not (idle and own == n_contexts - 1):
                with session.capture(prompt) as prefix:
                    prefix.sample(2, max_new_tokens=2 + 3 * own, seed=own)
                    prefix.score(rows[:1])
                    for row, weight in zip(rows, weights, strict=True):
                        (prefix.replay(row).logps * weight).sum().backward()
            result = session.finalize()
        found = adapter.gather_shards(base_model_of(part), _gradients(part))
        runs = one_by_one([partial(conventional_run, copy.deepcopy(model), c) for c in cases[: n_contexts - idle]])
        wanted = [run.gradients for run in runs]
    total = torch.cat([sum(w[n] for w in wanted).flatten() for n in found]) / n_contexts
    return relative_l2(torch.cat([found[n].flatten() for n in found]), total), result.n_sweeps


def out_of_turn(what):
    """What is said where a rank that shares experts with another context does not keep to the order."""
    size = dist_size()
    with LongStrawSession(own_part(whole_model(n_layers=4), size), expert_parallel_size=size) as session:
        prefix = session.capture(tokens(20, seed=rank()))
        if what == "packs":
            return said(lambda: prefix.replay_packed([tokens(3), tokens(4)]))
        out = prefix.replay(tokens(3))
        error = said(lambda: prefix.replay(tokens(4)))
        out.logps.sum().backward()
        session.finalize()
        return error


def round_trip(folder, size):
    """Whether adapters and weights put together from the parts are the whole, on this rank."""
    model = whole_model()
    group = AccelerateBackend(size, size).experts
    part = own_part(model, size)
    adapter = GLM52Adapter()
    adapter.experts = group
    whole = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    own = {n: p.detach() for n, p in part.named_parameters() if p.requires_grad}
    gathered, cut = adapter.gather_shards(base_model_of(part), own), adapter.own_shards(base_model_of(part), whole)
    loaded = load_expert_shard(folder, group.rank, size, dtype=torch.float32)
    stock = dict(base_model_of(part).named_parameters())
    return {
        "gathered": all(torch.equal(gathered[n], whole[n]) for n in whole),
        "cut": all(torch.equal(cut[n], own[n]) for n in own),
        "loaded": all(torch.equal(p, stock[_wrapped(n, stock)]) for n, p in loaded.named_parameters()),
        "experts held": sorted({m.num_experts for m in loaded.modules() if hasattr(m, "gate_up_proj")}),
        "largest": max(p.numel() for n, p in loaded.named_parameters() if "experts." in n and p.ndim == 3),
    }


def _wrapped(name, known):
    """The name that PEFT gave a parameter."""
    stem, _, leaf = name.rpartition(".")
    return next(n for n in (f"{stem}{'.base_layer' * i}.{leaf}" for i in range(3)) if n in known)


def refused(what):
    """What the constructor says on this rank."""
    size = dist_size()
    sizes = {"context_parallel_size": size, "expert_parallel_size": size}
    model, adapter = {
        "whole model": (whole_model(), None),
        "parts of another rank": (keep_expert_shard(whole_model(), (rank() + 1) % size, size), None),
        "one process, parts": (keep_expert_shard(whole_model(), 0, size), None),
        "no experts": (tiny_model("llama", n_layers=2), None),
        "sizes": (whole_model(), None),
    }[what]
    if what == "one process, parts":
        sizes = {"context_parallel_size": size}
    if what == "sizes":
        sizes = {"context_parallel_size": 1, "expert_parallel_size": 3}
    return said(lambda: LongStrawSession(model, adapter, **sizes).close())
