"""What the ranks of a `RankPool` run, and the test itself for what a single process does. They return plain values."""

import dataclasses
import importlib
import os
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
from accelerate import PartialState
from torch import distributed as dist
from transformers import GenerationConfig

from longstraw_sdk import LongStrawSession, PositionConfig
from longstraw_sdk.backends import AccelerateBackend, accelerate
from longstraw_sdk.bound import BoundModel
from longstraw_sdk.environment import POSITIONS
from longstraw_sdk.evidence.float64 import float64_upcasts
from longstraw_sdk.evidence.parity import _cast, _compare, check_parity, conventional_run, replay_run
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.lora import adapter_digest, base_model_of
from longstraw_sdk.models.qwen36 import Qwen36Adapter, gated_delta_net
from longstraw_sdk.ops import carry_state, carry_tail, prefix_attention
from longstraw_sdk.state import AttentionKVSpec, ContextGroup, PagedLayerState, PagedView, PagePool, Placement
from longstraw_sdk.state.context import GatherReplicated, RowMap
from longstraw_sdk.types import local

operator = importlib.import_module("longstraw_sdk.ops.prefix_attention")
CPU = torch.device("cpu")
VOCAB = 97


def rank():
    return int(os.environ.get("RANK", "0"))


def dist_size():
    return int(os.environ.get("WORLD_SIZE", "1"))


def whole_world():
    """The context of all ranks."""
    return AccelerateBackend(dist_size()).context


def tokens(n, seed=0):
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


def slow_decay(model):
    """States that remember for hundreds of tokens: what one rank fails to hand to the next then shows."""
    for module in model.modules():
        if hasattr(module, "A_log"):
            module.A_log.data.fill_(-5.0)
    return model


def small_model(architecture, dtype=torch.float64):
    """Two attention layers, or one between two Gated DeltaNet layers."""
    mixed = {"n_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    options = mixed if architecture == "qwen36" else {"n_layers": 2}
    return slow_decay(tiny_model(architecture, **options)).to(dtype)


def open_session(model, **options):
    return LongStrawSession(model, **{"chunk_tokens": 16, "page_tokens": 4, "poison": True, **options})


def flat_gradient(model):
    """Of all trained parameters; zeros where there is none."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained])


def flat_adapter(model):
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


# --- parity, sound and broken on purpose ---


def parity(architecture, n_layers, case, fault=None):
    """`n_layers` None: `small_model`. `fault` names one of `FAULTS`."""
    if n_layers is None:
        model = small_model(architecture, torch.float32)
    else:
        model = slow_decay(tiny_model(architecture, n_layers=n_layers))
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            FAULTS[fault](patch)
        return check_parity(model, dataclasses.replace(case, context_parallel_size=dist_size()))


def _slices_start_from(change):
    def breaks(patch):
        def broken(affine, initial, context):
            start, end = carry_state(affine, initial, context)
            return change(start, initial), end

        patch.setattr(gated_delta_net, "carry_state", broken)

    return breaks


def _no_tail(patch):
    def broken(columns, initial, n_real, context):
        before, end = carry_tail(columns, initial, n_real, context)
        return before * 0, end

    patch.setattr(gated_delta_net, "carry_tail", broken)


def _no_reduction(patch):
    patch.setattr(AccelerateBackend, "reduce_gradients", lambda self, parameters, *, replayed: ())


def _mean_over_the_context(patch):
    reduce = accelerate.reduce_over
    patch.setattr(accelerate, "reduce_over", lambda parameters, group, divisor: reduce(parameters, group, group.size))


def _in_attention(name, change):
    """`change(what the operator's own `name` gave, its arguments)`, where a context is."""

    def breaks(patch):
        sound = getattr(operator, name)

        def broken(*args):
            given, view = sound(*args), args[-1]
            return given if view is None or view.context is None else change(given, *args)

        patch.setattr(operator, name, broken)

    return breaks


def _without_the_new_tokens_before(given, x, view):
    before = given.shape[2] - x.shape[2]
    return torch.cat([given[:, :, :before] * 0, given[:, :, before:]], 2)


def _of_own_pages(given, d_flat, q, view):
    return d_flat.unflatten(1, (view.context.size, -1))[:, view.context.rank].reshape(q.shape)


def _scores_are_of_one_slice(patch):
    """Each rank back-propagates what all of them found as if it were its own: a gradient counted `size` times."""

    def broken(ctx, *grad_outputs):
        return grad_outputs[0][ctx.group.rank] * len(grad_outputs[0]), None

    patch.setattr(GatherReplicated, "backward", staticmethod(broken))


FAULTS = {
    "slices start from zero": _slices_start_from(lambda start, initial: start * 0),
    "slices start from the state before the forward": _slices_start_from(lambda start, initial: initial + start * 0),
    "state before a slice has no gradient": _slices_start_from(lambda start, initial: start.detach()),
    "convolution tail not carried": _no_tail,
    "gradient of one rank": _no_reduction,
    "gradient averaged over the context": _mean_over_the_context,
    "pages of other ranks ignored": _in_attention(
        "_start_return", lambda given, q, found, view: lambda: [given()[view.context.rank]]
    ),
    "pages of other ranks ignored in backward": _in_attention("_own_queries", _of_own_pages),
    "new tokens of other ranks ignored": _in_attention("_seen", _without_the_new_tokens_before),
    "gradient of new rows not summed": _in_attention("_own_rows", lambda given, d_x, n_own, view: d_x[:, :, -n_own:]),
    "gradient of the scores counted by every rank": _scores_are_of_one_slice,
}


# --- operators alone ---


def _errors(found, wanted):
    """Relative L2 by name. Inputs are drawn from N(0, 1): what is below 1e-4 is rounding of a zero."""
    assert found.keys() == wanted.keys()
    errors = {}
    for name, tensor in found.items():
        assert tensor.shape == wanted[name].shape, (name, tensor.shape, wanted[name].shape)
        assert bool(tensor.isfinite().all()), name
        norm = max(float(wanted[name].double().norm()), 1e-4)
        errors[name] = float((tensor.double() - wanted[name].double()).norm()) / norm
    return errors


def collectives():
    """Every collective of a context against what it must give, on this rank."""
    context = whole_world()
    w, r = context.size, context.rank
    every = torch.arange(w * w * 3).view(w, w, 3)  # [from, to, 3]
    before = context.received_bytes
    gathered = context.gather(every[r].T)  # not contiguous
    received = context.received_bytes - before
    exchanged = context.exchange(every[r])
    summed = context.sum_scatter(every[r])
    before = context.received_bytes
    # Rank r sends s rows to rank s, rows that say from where and to where.
    sent = torch.cat([torch.tensor([[r, s]]).expand(s, 2) for s in range(w)])
    uneven = context.exchange_uneven(sent, list(range(w)), [r] * w)
    received_uneven = context.received_bytes - before
    first = context.broadcast(torch.full((2,), r + 5, dtype=torch.uint8))
    return {
        "gather": torch.equal(gathered, every.transpose(1, 2)),
        "received": received == (w - 1) * every[r].nbytes,
        "exchange": torch.equal(exchanged, every[:, r]),
        "exchange_uneven": uneven.tolist() == [[s, r] for s in range(w) for _ in range(r)],
        "received unevenly": received_uneven == (w - 1) * r * sent[:1].nbytes,
        "sum_scatter": torch.equal(summed, every[:, r].sum(0)),
        "agree": context.agree(True) and not context.agree(r != w - 1) and not context.agree(False),
        "agree on": [
            context.agree_on(*given) for given in ((True, 2**55 + 1), (r > 0, 2**55), (True, 2**55 + (r == 0)))
        ]
        == [(True, True), (False, True), (True, False)],
        "broadcast": torch.equal(first, torch.tensor([5, 5], dtype=torch.uint8)),
    }


def reduced(context_parallel_size, replayed=True):
    """Gradients after a reduction: one of float32, one that only the last rank has, one of bfloat16, one of nobody."""
    a, b, c, d = (torch.nn.Parameter(torch.zeros(3, dtype=t)) for t in [torch.float32] * 2 + [torch.bfloat16] * 2)
    a.grad = torch.tensor([1.0, 10.0, 100.0]) * (rank() + 1)
    if rank() == dist_size() - 1:
        b.grad = torch.full((3,), 8.0)
    c.grad = torch.tensor([1.0 if rank() else 256.0, 3.0, 0.0], dtype=torch.bfloat16)  # 256 + 1 rounds to 256
    result = AccelerateBackend(context_parallel_size).reduce_gradients(iter([a, b, c, d]), replayed=replayed)
    return [None if p.grad is None else (p.grad.dtype, p.grad.tolist()) for p in (a, b, c, d)], result


def carry_state_errors(leading, dims, dtype=torch.float64, autocast=False, frozen=()):
    """Against autograd through the chain of all slices. `frozen` inputs take no gradient."""
    context = whole_world()
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    key_dim, value_dim = dims
    names = ("transition", "own", "initial")
    transitions, owns = draw(context.size, *leading, key_dim, key_dim), draw(context.size, *leading, key_dim, value_dim)
    initial, d_end = draw(*leading, key_dim, value_dim), draw(*leading, key_dim, value_dim)
    d_starts = draw(*owns.shape)

    whole = [t.to(torch.float64, copy=True).requires_grad_() for t in (transitions, owns, initial)]
    states = [whole[2]]
    for a, b in zip(whole[0], whole[1], strict=True):
        states.append(a @ states[-1] + b)
    loss = (states[-1] * d_end).sum() + sum((s * d).sum() for s, d in zip(states, d_starts, strict=False))
    loss.backward()

    mine = [transitions[context.rank].clone(), owns[context.rank].clone(), initial.clone()]
    for name, tensor in zip(names, mine, strict=True):
        tensor.requires_grad_(name not in frozen)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        start, end = carry_state(torch.cat([mine[1], mine[0]], -1), mine[2], context)
        ((start * d_starts[context.rank]).sum() + (end * d_end).sum()).backward()
    found = {"start": start.detach(), "end": end.detach()}
    wanted = {"start": states[context.rank].detach(), "end": states[-1].detach()}
    of_rank = [whole[0].grad[context.rank], whole[1].grad[context.rank], whole[2].grad]
    for name, tensor, gradient in zip(names, mine, of_rank, strict=True):
        if name not in frozen:
            found[f"d_{name}"], wanted[f"d_{name}"] = tensor.grad, gradient
    return _errors(found, wanted)


def carry_tail_errors(n_real, width, size, believed=None):
    """Slices of `n_real` columns, padded to `width` with NaN, of which `size` travel; against one concatenation.

    `believed` is what the operator is told instead of `n_real`.
    """
    context = whole_world()
    generator = torch.Generator().manual_seed(0)

    def draw(n):
        return torch.randn(2, 3, n, generator=generator, dtype=torch.float64)

    initial, columns = draw(size), draw(sum(n_real))
    d_befores, d_end = [draw(size) for _ in n_real], draw(size)
    ends = [sum(n_real[:r]) for r in range(len(n_real) + 1)]

    whole = [initial.clone().requires_grad_(), columns.clone().requires_grad_()]
    known = torch.cat(whole, -1)
    befores = [known[..., end : end + size] for end in ends]
    loss = (befores[-1] * d_end).sum() + sum((b * d).sum() for b, d in zip(befores, d_befores, strict=False))
    loss.backward()

    first, last = ends[context.rank : context.rank + 2]
    own = torch.nn.functional.pad(columns[..., first:last], (0, width - (last - first)), value=float("nan"))
    mine = [own.requires_grad_(), initial.clone().requires_grad_()]
    before, end = carry_tail(*mine, believed or n_real, context)
    ((before * d_befores[context.rank]).sum() + (end * d_end).sum()).backward()
    d_own = torch.nn.functional.pad(whole[1].grad[..., first:last], (0, width - (last - first)))
    return _errors(
        {"before": before.detach(), "end": end.detach(), "d_columns": mine[0].grad, "d_initial": mine[1].grad},
        {
            "before": befores[context.rank].detach(),
            "end": befores[-1].detach(),
            "d_columns": d_own,
            "d_initial": whole[0].grad,
        },
    )


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """`chunks` of the prefix are resident, the first `n_seen` of them visible; None: all. L = `decoded` + `n_new`."""

    split: bool = True
    n_new: int = 7
    decoded: int = 0
    chunks: tuple[int, ...] = (8, 8, 3)
    n_seen: int | None = None
    min_width: int = 1
    batch: int = 2
    kv_heads: int = 2
    groups: int = 2
    page_tokens: int = 3
    dims: tuple[int, int] = (3, 5)
    dtype: torch.dtype = torch.float64
    autocast: bool = False


def attention_errors(case):
    """Output and every gradient on this rank against dense softmax over all tokens; `d_page_*` are of its own.

    bfloat16 is held to what one process computes in it: both round the same sums once.
    """
    context = whole_world()
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

    key_dim, value_dim = case.dims
    n_local, n_heads = case.decoded + case.n_new, case.kv_heads * case.groups
    query, d_out = draw(case.batch, n_heads, case.n_new, key_dim), draw(case.batch, n_heads, case.n_new, value_dim)
    key, value = (draw(case.batch, case.kv_heads, n_local, d) for d in case.dims)
    page_k, page_v = (draw(case.kv_heads, sum(case.chunks), d) for d in case.dims)
    seen = case.chunks if case.n_seen is None else case.chunks[: case.n_seen]
    scale = key_dim**-0.5

    expect = _dense_attention if case.dtype.itemsize > 2 else _attention_of_one_process
    out, *gradients = expect(query, key, value, page_k, page_v, d_out, sum(seen), scale)

    pool, pages = _no_pages(page_k, page_v, case.page_tokens)
    row_map = RowMap(context, case.min_width)
    rows, limit, first = [], 0, 0
    for i, n in enumerate(case.chunks):
        part = context.slice_of(n, case.min_width)
        own = range(first + part.start, first + part.start + part.n_real)
        pages.append({"k": page_k[None, :, own.start : own.stop], "v": page_v[None, :, own.start : own.stop]})
        row_map.append(n)
        rows += own
        first += n
        limit = len(rows) if i < len(seen) else limit
    view = PagedView(pages, limit, True, row_map, case.split, sum(seen))

    part = context.slice_of(case.n_new, case.min_width)
    place = slice(part.start, part.start + part.n_real) if case.split else slice(None)

    def own_part(x, fill):
        if not case.split:
            return x.clone()
        return torch.nn.functional.pad(x[:, :, place], (0, 0, 0, part.width - part.n_real), value=fill)

    leaves = [own_part(t, 7.0).requires_grad_() for t in (query, key, value)]
    with torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext():
        found_out = prefix_attention(*leaves, view, scale)
        found_out.backward(own_part(d_out, 0.0))
    n = part.n_real if case.split else None
    found = {"out": found_out.detach()[:, :, :n]}
    wanted = {"out": out[:, :, place]}
    for name, leaf, gradient in zip(("query", "key", "value"), leaves, gradients, strict=False):
        found[f"d_{name}"], wanted[f"d_{name}"] = leaf.grad[:, :, :n], gradient[:, :, place]
        if case.split:
            padding = leaf.grad[:, :, n:]
            found[f"d_{name} of padding"], wanted[f"d_{name} of padding"] = padding, torch.zeros_like(padding)
    collected = pages.cotangents(0, limit)
    assert bool(collected) == bool(sum(seen)), "a prefix of no tokens has nothing to sweep"
    for name, gradient in zip(collected, gradients[3:], strict=False):
        found[f"d_page_{name}"], wanted[f"d_page_{name}"] = collected[name][0], gradient[:, rows[:limit]]
    pool.release("prompt")
    assert pool.audit() == []
    return _errors(found, wanted), rows


def _no_pages(page_k, page_v, page_tokens):
    spec = AttentionKVSpec(0, n_kv_heads=len(page_k), key_dim=page_k.shape[-1], value_dim=page_v.shape[-1])
    pool = PagePool(page_tokens, poison=True)
    pool.open("prompt")
    return pool, PagedLayerState(spec, pool, "prompt", CPU)


def _dense_attention(query, key, value, page_k, page_v, d_out, n_seen, scale):
    """Output and the gradients of the first five arguments, in float64."""
    leaves = [t.to(torch.float64, copy=True).requires_grad_() for t in (query, key, value, page_k, page_v)]
    query, key, value, page_k, page_v = leaves
    groups = query.shape[1] // key.shape[1]
    n_new, n_local = query.shape[2], key.shape[2]

    def joined(pages, new):
        return torch.cat([pages[None, :, :n_seen].expand(len(new), -1, -1, -1), new], 2).repeat_interleave(groups, 1)

    causal = torch.ones(n_new, n_local, dtype=torch.bool).tril(n_local - n_new)
    visible = torch.cat([torch.ones(n_new, n_seen, dtype=torch.bool), causal], 1)
    scores = (query @ joined(page_k, key).transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
    out = scores.softmax(-1) @ joined(page_v, value)
    out.backward(d_out.double())
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _attention_of_one_process(query, key, value, page_k, page_v, d_out, n_seen, scale):
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    _, pages = _no_pages(page_k, page_v, 1000)
    pages.append({"k": page_k[None], "v": page_v[None]})
    out = prefix_attention(*leaves, PagedView(pages, n_seen, True), scale)
    out.backward(d_out)
    collected = pages.cotangents(0, n_seen)
    return [out.detach(), *(leaf.grad for leaf in leaves), collected["k"][0], collected["v"][0]]


# --- sessions ---

PROMPT, OTHER_PROMPT = tokens(41, 1), tokens(30, 2)
ROWS = [tokens(n, 2 + n) for n in (6, 9, 1, 3)]


def sampled(architecture, context_parallel_size, seed, random_state=5):
    """Rows and scores in float64; the first rank's global random state begins at `random_state`, others elsewhere."""
    model = small_model(architecture)
    torch.manual_seed(random_state + 1000 * rank())
    before = torch.get_rng_state()
    options = {"context_parallel_size": context_parallel_size, "temperature": 0.7}
    with float64_upcasts(), open_session(model, **options) as session:
        with session.capture(PROMPT) as prefix:
            rows = prefix.sample(3, max_new_tokens=12, seed=seed)
            after = torch.get_rng_state()
            scores = prefix.score_with_entropy(rows)
    return {
        "rows": [row.tolist() for row in rows],
        "logps": torch.cat([s.logps for s in scores]),
        "entropies": torch.cat([s.entropy for s in scores]),
        "state kept": torch.equal(before, after),
        "state": after.tolist(),
    }


def trained(architecture, context_parallel_size, optimizer_name, n_steps=2, options=None):
    """The adapter after steps on two responses of one prompt, in float64, and what every `finalize` said."""
    model = small_model(architecture)
    if rank():
        model.load_state_dict({n: p + rank() if ".lora_" in n else p for n, p in model.state_dict().items()})
    start = flat_adapter(small_model(architecture))
    optimizer = getattr(torch.optim, optimizer_name)([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    results, digests, logps = [], [], []
    with (
        float64_upcasts(),
        open_session(model, context_parallel_size=context_parallel_size, **(options or {})) as session,
    ):
        for _ in range(n_steps):
            with session.capture(PROMPT) as prefix:
                outs = prefix.replay_packed(ROWS[:2])
                (-outs[0].logps.mean() + 0.7 * outs[1].logps.mean() - 0.1 * outs[1].entropy.mean()).backward()
            results.append(session.finalize())
            logps.append(torch.cat([out.logps.detach() for out in outs]))
            optimizer.step()
            optimizer.zero_grad()
            digests.append(adapter_digest(model))
    return {"change": flat_adapter(model) - start, "results": results, "digests": digests, "logps": torch.cat(logps)}


def gradient_of(works, context_parallel_size, which=None):
    """Gradient of context `which`, this rank's if None. A work is a list of (prompt, responses)."""
    model = small_model("qwen36")
    which = rank() // context_parallel_size if which is None else which
    with float64_upcasts(), open_session(model, context_parallel_size=context_parallel_size) as session:
        for prompt, rows in works[which]:
            with session.capture(prompt) as prefix:
                for i, row in enumerate(rows):
                    (prefix.replay(row).logps.sum() * (i + 1)).backward()
        result = session.finalize()
    return flat_gradient(model), result


def held(architecture, prompt_tokens, chunk_tokens, context_parallel_size):
    """Rows at every boundary, page bytes before and after a replay, the pool's books after release."""
    model = small_model(architecture, torch.float32)
    size = context_parallel_size
    with open_session(model, chunk_tokens=chunk_tokens, context_parallel_size=size) as session:
        with session.capture(tokens(prompt_tokens)) as prefix:
            state = prefix._state
            captured = sum(paged.n_bytes for paged in state.paged.values())
            prefix.replay(ROWS[0]).logps.sum().backward()
            replayed = sum(paged.n_bytes for paged in state.paged.values())
            found = {"bounds": list(state.bounds), "owned": list(state.owned)}
        session.finalize()
        found |= {"audit": session.pool.audit(), "live": session.pool.live_bytes}
    return found | {"captured": captured, "replayed": replayed}


def staged(architecture):
    """Whether pages that visit through a link give the same bits as pages beside the model, on this rank."""
    from test_staging import SimulatedLink

    runs = []
    for link in (None, SimulatedLink()):
        model = small_model(architecture, torch.float32)
        with open_session(model, context_parallel_size=dist_size()) as session:
            if link is not None:
                session._core.placement = Placement(CPU, link)
            for prompt in (PROMPT, PROMPT[:3]):
                with session.capture(prompt) as prefix:
                    rows = prefix.sample(2, max_new_tokens=3, seed=0)
                    outs = prefix.replay_packed(ROWS)
                    torch.cat([out.logps for out in outs]).sum().backward()
            session.finalize()
        runs.append([*rows, *(out.logps.detach() for out in outs), flat_gradient(model)])
    return link.n_copied, [torch.equal(a, b) for a, b in zip(*runs, strict=True)]


def autocast_gradient(context_parallel_size):
    """Gradient of a float32 model under bfloat16 autocast."""
    model = small_model("qwen36", torch.float32)
    session = open_session(model, context_parallel_size=context_parallel_size)
    with torch.autocast("cpu", torch.bfloat16), session:
        with session.capture(PROMPT) as prefix:
            for row in ROWS:
                prefix.replay(row).logps.sum().backward()
        session.finalize()
    return flat_gradient(model).double()


# --- frozen weights that FSDP2 shards ---


def sharded_parity(architecture, case, fault=None):
    """ParityResult against conventional autograd of the whole model, and the share of frozen weights that is held."""
    case = dataclasses.replace(case, context_parallel_size=dist_size())
    model = slow_decay(tiny_model(architecture, n_layers=4))
    with (
        float64_upcasts() if case.dtype == "float64" else nullcontext(),
        pytest.MonkeyPatch.context() as patch,
    ):
        wanted = conventional_run(_cast(model, case.dtype), case)
        sharded = _cast(model, case.dtype)
        patch.setenv("ACCELERATE_USE_FSDP", "true")
        patch.setenv("FSDP_VERSION", "2")
        if fault is not None:
            patch.setattr(BoundModel, "is_sharded", False)
        found = replay_run(sharded, case)
    layers = base_model_of(sharded).base_model.layers
    frozen = [p for p in layers.parameters() if not p.requires_grad]
    held = sum(local(p).numel() for p in frozen) / sum(p.numel() for p in frozen)
    whole = all(local(p) is p for p in sharded.parameters() if p.requires_grad)
    return _compare(case, found, wanted, 0.0), held, whole


def asked_for_fsdp(context_parallel_size, variables):
    """What the constructor says where `accelerate launch` was told to use FSDP."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        model = small_model("llama", torch.float32)
        return said(lambda: open_session(model, context_parallel_size=context_parallel_size).close())


# --- mistakes ---


def hasty_backend(context_parallel_size, seconds=3):
    """A backend whose ranks wait for each other a few seconds only, so that a test may let them wait in vain."""
    world, size = dist_size(), context_parallel_size
    limit = timedelta(seconds=seconds)
    backend = AccelerateBackend(size)
    contexts = [dist.new_group(range(i, i + size), timeout=limit) for i in range(0, world, size)]
    backend.context = ContextGroup(contexts[rank() // size]) if size > 1 else None
    data = [dist.new_group(range(i, world, size), timeout=limit) for i in range(size)]
    backend.data = ContextGroup(data[rank() % size]) if world > size else None
    return backend


def said(action):
    """ "Type: message" of the error that `action` raises, None if it raises none."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def different_input(what):
    """What each rank says when it is given something else than the first, and whether the session goes on then."""
    odd = rank() == dist_size() - 1
    model = small_model("qwen36", torch.float32)
    with open_session(model, backend=hasty_backend(dist_size())) as session:
        prefix = session.capture(PROMPT)
        mine = {
            "prompt": lambda: session.capture(OTHER_PROMPT if odd else PROMPT),
            "length of the prompt": lambda: session.capture(PROMPT[:-1] if odd else PROMPT),
            "responses to score": lambda: prefix.score([ROWS[odd]]),
            "responses to replay": lambda: prefix.replay(ROWS[odd]),
            "order of responses": lambda: prefix.replay_packed(ROWS[::-1] if odd else ROWS),
            "number of responses": lambda: prefix.replay_packed(ROWS[: 1 + odd]),
            "cut between responses": lambda: prefix.score(list(torch.cat(ROWS).split([10, 9] if odd else [9, 10]))),
            "kind of pass": lambda: (prefix.replay if odd else lambda row: prefix.score([row]))(ROWS[0]),
            "rows to sample": lambda: prefix.sample(1 + odd, max_new_tokens=2),
            "tokens to sample": lambda: prefix.sample(1, max_new_tokens=2 + odd),
            "temperature": lambda: prefix.sample(1, max_new_tokens=2, temperature=1.0 + odd),
            "generation config": lambda: prefix.generate(1, GenerationConfig(max_new_tokens=2 + odd)),
        }[what]
        before = session.pool.live_bytes
        error = said(mine)
        kept = session.pool.live_bytes == before
        goes_on = error is not None and error.startswith("InputError") and said(lambda: prefix.replay(ROWS[0])) is None
    return error, kept, goes_on


def invalid_on_one(what):
    """What each rank says when the last one alone is given, or has done, what cannot work."""
    odd = rank() == dist_size() - 1
    model = small_model("llama", torch.float32)
    with open_session(model, backend=hasty_backend(dist_size())) as session:
        if what == "prompt":
            return said(lambda: session.capture(torch.full_like(PROMPT, VOCAB) if odd else PROMPT))
        if what == "dtype of the prompt":
            return said(lambda: session.capture(PROMPT.int() if odd else PROMPT))
        prefix = session.capture(PROMPT)
        if what == "response":
            return said(lambda: prefix.replay(torch.full_like(ROWS[0], VOCAB) if odd else ROWS[0]))
        if what == "no_grad":
            with torch.set_grad_enabled(not odd):
                return said(lambda: prefix.replay(ROWS[0]))
        if what == "max_new_tokens":
            return said(lambda: prefix.sample(1, max_new_tokens=0 if odd else 1))
        assert what == "weights"
        if odd:
            with torch.no_grad():
                model.get_output_embeddings().weight.add_(0.0)
        return said(lambda: prefix.replay(ROWS[0]))


def other_run(what):
    """What a constructor says on each rank where the last rank's session differs from the others'."""
    odd = rank() == dist_size() - 1
    model = small_model("llama", torch.float32)
    options = {}
    positions = PositionConfig(factor=2 + odd, original_max_positions=512)
    if what == "a weight":
        weight = model.get_output_embeddings().weight.data
        weight[5, 3] = torch.nextafter(weight[5, 3], torch.tensor(1.0)) if odd else weight[5, 3]
    elif what == "the dtype":
        model.to(torch.bfloat16 if odd else torch.float32)
    elif what == "an option that cannot work":
        options = {"chunk_tokens": 0 if odd else 16}
    elif what != "nothing":
        options = {
            "gradient_scope": {"gradient_scope": "response" if odd else "full"},
            "prefix_adapter": {"prefix_adapter": "frozen" if odd else "live"},
            "chunk_tokens": {"chunk_tokens": 16 + odd},
            "temperature": {"temperature": 1.0 + odd},
            "positions": {"positions": positions},
            "positions of the environment": {},
        }[what]
    with pytest.MonkeyPatch.context() as patch:
        if what == "positions of the environment":
            patch.setenv(POSITIONS, positions.to_json())
        error = said(lambda: open_session(model, backend=hasty_backend(1), probe=False, **options).close())
    if what not in ("a weight", "the dtype"):
        open_session(model).close()  # a refused model stays free
    return error


def not_finite(token):
    """What capture says where a prompt's last token, which one rank runs, has an embedding that is `token`."""
    model = small_model("llama", torch.float32)
    model.get_input_embeddings().weight.data[VOCAB - 1] = token
    prompt = torch.cat([PROMPT % (VOCAB - 1), torch.tensor([VOCAB - 1, 5])])
    with open_session(model, backend=hasty_backend(dist_size())) as session:
        error = said(lambda: session.capture(prompt))
        return error, session.pool.live_bytes, session.pool.audit()


def gradient_not_finite(context_parallel_size, factor):
    """What finalize says where the last rank multiplied its gradient by `factor`, and when it is taken again."""
    model = small_model("llama")

    def update(factor):
        with session.capture(PROMPT) as prefix:
            prefix.replay(ROWS[0]).logps.sum().backward()
        if rank() == dist_size() - 1:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad *= factor
        return said(session.finalize)

    with float64_upcasts(), open_session(model, context_parallel_size=context_parallel_size) as session:
        first = update(factor)
        session.discard()
        return first, update(1.0), bool(flat_gradient(model).isfinite().all()), session.pool.audit()


def finalized_twice(context_parallel_size):
    """What is said when a second update begins on the gradient of the first, and the gradient."""
    model = small_model("llama")

    def updates():
        with open_session(model, context_parallel_size=context_parallel_size) as session:
            for row in ROWS[:2]:
                with session.capture(PROMPT) as prefix:
                    prefix.replay(row).logps.sum().backward()
                session.finalize()

    with float64_upcasts():
        return said(updates), flat_gradient(model)


def finalized_again():
    """What a second `finalize` says where contexts have prompts of their own, and by how much it changed gradients."""
    model = small_model("llama", torch.float32)
    with open_session(model, context_parallel_size=dist_size() // 2) as session:
        with session.capture(PROMPT) as prefix:
            prefix.replay(ROWS[0]).logps.sum().backward()
        session.finalize()
        before = flat_gradient(model)
        return said(session.finalize), float((flat_gradient(model) - before).norm())


def idle_contexts(n_updates=2):
    """Whether finalize works, without zero_grad between, while only the first context has had prompts in the last."""
    model = small_model("llama")
    with float64_upcasts(), open_session(model, context_parallel_size=2) as session:
        with session.capture(PROMPT) as prefix:
            prefix.replay(ROWS[0]).logps.sum().backward()
        first = session.finalize()
        once = flat_gradient(model)
        if rank() < 2:
            model.zero_grad()
            with session.capture(PROMPT) as prefix:
                prefix.replay(ROWS[0]).logps.sum().backward()
        second = session.finalize()
        return [r.group for r in first.reductions], [r.group for r in second.reductions], once, flat_gradient(model)


def groups_after_a_restart():
    """Whether a context works after torch.distributed was destroyed and initialised again."""
    whole_world().broadcast(torch.zeros(1))
    dist.destroy_process_group()
    PartialState._reset_state()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    return whole_world().gather(torch.tensor([rank()])).flatten().tolist()


def saved_for_the_carry():
    """Bytes that carry_state keeps for its backward, and those of the states of one rank."""
    state = torch.randn(3, 4, 4)
    kept = []
    keep = lambda t: kept.append(t.untyped_storage().nbytes()) or t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        carry_state(torch.cat([state, state], -1).requires_grad_(), state, whole_world())
    return sum(kept), state.nbytes


def one_token_prompt():
    """Sweeps of a prompt that has no prefix."""
    model = small_model("llama", torch.float32)
    with open_session(model, context_parallel_size=dist_size()) as session:
        with session.capture(PROMPT[:1]) as prefix:
            prefix.replay(ROWS[0]).logps.sum().backward()
        return session.finalize().n_sweeps


def different_loss():
    """What is said when the ranks of a context give one response different advantages."""
    model = small_model("llama", torch.float32)
    with open_session(model, backend=hasty_backend(dist_size())) as session, session.capture(PROMPT) as prefix:
        loss = prefix.replay(ROWS[0]).logps.sum() * (1.0 - rank())
        return said(loss.backward)


def behind_hooks(context_parallel_size):
    """What is said where accelerate's hooks hide the class of a layer, and the gradient."""
    from accelerate.hooks import attach_execution_device_hook

    model = small_model("qwen36")
    attach_execution_device_hook(model.get_base_model().model, "cpu")

    def update():
        with open_session(model, context_parallel_size=context_parallel_size) as session:
            with session.capture(PROMPT) as prefix:
                prefix.replay(ROWS[0]).logps.sum().backward()
            session.finalize()

    with float64_upcasts():
        return said(update), flat_gradient(model)


def refused(what):
    """What the constructor says on this rank."""

    class NotSplit(Qwen36Adapter):
        context_parallel = False

    model = small_model("qwen36", torch.float32)
    size = dist_size()
    options = {
        "size": {"context_parallel_size": 3},
        "adapter": {"adapter": NotSplit(), "context_parallel_size": size},
        "local": {"backend": "local"},
        "local with a context": {"backend": "local", "context_parallel_size": size},
        "name": {"backend": "fsdp"},
        "another size than the backend's": {"backend": AccelerateBackend(1), "context_parallel_size": size},
        "device": {},
    }[what]
    if what == "device":
        return said(lambda: whole_world().check_device(torch.device("cuda")))
    error = said(lambda: open_session(model, **options).close())
    # Refused models stay free.
    open_session(model, context_parallel_size=size).close()
    return error


def closed_in_order():
    """What each rank says to a step before `finalize`, and to a second `finalize`."""
    model = small_model("qwen36", torch.float32)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with open_session(model, context_parallel_size=dist_size()) as session:
        with session.capture(PROMPT) as prefix:
            prefix.replay(ROWS[0]).logps.sum().backward()
        early = said(optimizer.step)
        session.finalize()
        again = said(session.finalize)
        return early, again, said(optimizer.step)
