"""What the ranks of a `RankPool` run on Megatron's backend. They return plain values."""

import importlib
import multiprocessing
from contextlib import ExitStack, contextmanager

import pytest
import rank_cases
import rank_experts
import rank_trainers
import torch
from rank_cases import dist_size, rank, said, tokens
from torch import distributed as dist
from torch.overrides import TorchFunctionMode

from longstraw_sdk import LongStrawSession
from longstraw_sdk.backends import (
    AccelerateBackend,
    MegatronBackend,
    load_sharded,
    make_backend,
    megatron_experts,
    megatron_gradients,
    save_sharded,
)
from longstraw_sdk.backends.megatron_cpu import on_cpu
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.lora import adapter_digest, base_model_of
from longstraw_sdk.models.glm52 import GLM52Adapter
from longstraw_sdk.ops import through_experts

GROUPS = ("cp", "ep", "dp", "dp_cp", "expt_dp")


@contextmanager
def megatron(context_size, expert_size=1, **options):
    """A backend; while it is there, sessions that are given none take Megatron too."""
    backend = MegatronBackend(context_size, expert_size, **options)
    try:
        yield backend
    finally:
        uninitialise()


def uninitialise():
    importlib.import_module("megatron.core.parallel_state").destroy_model_parallel()


@contextmanager
def counted(owner, name):
    """A list that grows by one with each call of `owner.name`."""
    calls, stock = [], getattr(owner, name)

    def count(*args, **kwargs):
        calls.append(1)
        return stock(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, count)
        yield calls


def finalized():
    return counted(importlib.import_module("megatron.core.distributed"), "finalize_model_grads")


def group_table(context_size, expert_size):
    """Global ranks of each of this rank's groups, and the sizes that the backend says."""
    with megatron(context_size, expert_size) as backend:
        ranks = [dist.get_process_group_ranks(getattr(backend.groups, name)) for name in GROUPS]
        sizes = [None if g is None else g.size for g in (backend.context, backend.experts, backend.world)]
    return ranks, sizes


# --- parity, sound and broken on purpose ---


def parity(architecture, case, fault=None):
    """ParityResult of four layers, the calls of `finalize_model_grads`, and those of the dispatcher."""
    with megatron(dist_size()), finalized() as calls, pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            FAULTS[fault](patch)
        return rank_cases.parity(architecture, 4, case), len(calls)


def expert_parity(context_size, expert_size, case, fault=None, other_prompts=False):
    with megatron(context_size, expert_size), pytest.MonkeyPatch.context() as patch:
        with finalized() as calls, counted(megatron_experts.MegatronDispatch, "__call__") as dispatched:
            if fault in FAULTS:
                FAULTS[fault](patch)
                fault = None
            result = rank_experts.parity(context_size, expert_size, case, fault, other_prompts, n_layers=4)
    return result, len(calls), len(dispatched)


def contexts_that_share_experts(context_size, expert_size):
    with megatron(context_size, expert_size):
        return rank_experts.uneven_work(context_size, expert_size)


def routed_to_few(context_size, expert_size, case):
    with megatron(context_size, expert_size):
        return rank_experts.routed_to_few(context_size, expert_size, case)


def two_steps(context_size, expert_size):
    with megatron(context_size, expert_size):
        return rank_experts.two_steps(context_size, expert_size)


def _scaled_by_default(patch):
    """Megatron's own default, a mean over all ranks."""
    make = megatron_gradients.transformer_config
    patch.setattr(megatron_gradients, "transformer_config", lambda calculate_per_token_loss, **other: make(**other))


def _not_marked(patch):
    """Experts carry no `allreduce = False` when the buffers are made."""
    init = megatron_gradients.GradientBuffers.__init__

    def broken(self, model, *args, **options):
        for p in model.parameters():
            p.allreduce = True
        init(self, model, *args, **options)

    patch.setattr(megatron_gradients.GradientBuffers, "__init__", broken)


FAULTS = {"scaled by default": _scaled_by_default, "experts not marked": _not_marked}


# --- gradients over several updates ---


class Leaves(torch.nn.Module):
    """Parameters whose gradients are given: two of float32, one of bfloat16, one of nobody, one of experts."""

    def __init__(self, expert_size):
        super().__init__()
        for name in "abcde":
            dtype = torch.bfloat16 if name == "c" else torch.float32
            setattr(self, name, torch.nn.Parameter(torch.zeros(2, dtype=dtype)))
        self.e.allreduce = expert_size == 1

    def add(self, **gradients):
        sum((getattr(self, name) * value).sum() for name, value in gradients.items()).backward()


def updates(kind, context_size, expert_size):
    """`.grad` of every leaf after each of several updates, all small integers: exact in every dtype."""
    maker = {"accelerate": AccelerateBackend, "megatron": MegatronBackend}[kind]
    backend, model = maker(context_size, expert_size), Leaves(expert_size)
    parameters, own = list(model.parameters()), rank() + 1
    detach = backend.attach(model)
    seen, sizes = [], []

    def reduce(replayed=True):
        reductions = backend.reduce_gradients(iter(parameters), replayed=replayed)
        seen.append([None if p.grad is None else (p.grad.dtype, p.grad.tolist()) for p in parameters])
        sizes.append([(r.ranks, r.n_parameters, r.n_elements) for r in reductions])

    def clear(to_none=True):
        for p in parameters:
            if p.grad is not None:
                p.grad = None if to_none else p.grad.zero_()

    first = rank() < context_size
    last = {"b": 8.0} if rank() == dist_size() - 1 else {}
    model.add(a=own, c=own, **last)
    model.add(a=10 * own, c=16 * own, e=own)
    reduce()  # of two backward passes
    views = kind == "accelerate" or parameters[0].grad is parameters[0].main_grad
    reduce(replayed=False)  # nothing happened since
    clear()
    model.add(a=own, e=3 * own)
    reduce()  # after gradients were set to None
    clear(to_none=False)
    model.add(a=own, b=own)
    reduce()  # after they were filled with zeros
    clear()
    model.add(a=100, c=100, d=100)
    clear()
    model.add(a=own)
    reduce()  # what was discarded before the update closed is gone
    clear()
    if first:
        model.add(a=own, c=2.0 * own)
        model.add(a=own)
    reduce(replayed=first)  # other contexts had no prompt
    clear()
    parameters[0].grad, parameters[1].grad = torch.full((2,), 4.0), torch.full((2,), 2.0)
    model.add(a=own)
    reduce()  # on top of what was put there
    clear()
    if context_size == 1:  # others are refused by the session
        model.add(a=2 * own, c=2 * own)
        reduce()
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_(2)
        model.add(a=own)
        reduce()  # on top of what was reduced and then clipped
    detach()
    clear()
    model.add(a=own)
    seen.append([parameters[0].grad.tolist(), hasattr(parameters[0], "main_grad")])  # an ordinary leaf again
    if kind == "megatron":
        uninitialise()
    return seen, sizes, views


def reduced_twice(context_size, expert_size):
    """`.grad` of an expert after its reduction and after one more, where experts are spread over contexts too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("longstraw_sdk.backends.megatron"), "check_sizes", lambda *sizes: None)
        with megatron(context_size, expert_size) as backend:
            model = Leaves(expert_size)
            detach, found = backend.attach(model), []
            model.add(e=4 * rank())
            for replayed in (True, False):
                backend.reduce_gradients(model.parameters(), replayed=replayed)
                found.append(model.e.grad.tolist())
            detach()
    return found


def session_life(context_size):
    """What a session does around its updates; the other contexts have no prompt in the second."""
    model = rank_cases.small_model("llama", torch.float32)
    own = rank() // context_size
    said_twice = None
    gradients = []
    with megatron(context_size) as backend, finalized() as calls, rank_cases.open_session(model, backend=backend) as s:
        for update in range(2):
            if own == 0 or update == 0:
                with s.capture(tokens(30 + own, own)) as prefix:
                    for n in (4, 2):
                        prefix.replay(tokens(n, n + own)).logps.sum().backward()
            s.finalize()
            found = rank_cases.flat_gradient(model)
            said_twice = said(s.finalize)
            gradients.append((found, torch.equal(found, rank_cases.flat_gradient(model))))
            if update == 0 and context_size > 1:
                with s.capture(tokens(30)) as prefix:
                    not_cleared = said(lambda prefix=prefix: prefix.replay(tokens(3)))
                s.finalize()
            model.zero_grad()
        second = said(lambda: LongStrawSession(tiny_model("llama", n_layers=2), backend=backend))
        n_calls = len(calls)
    return gradients, said_twice, not_cleared if context_size > 1 else None, second, n_calls


def session_gradients_of_one_process(prompts):
    """Sum over the rows of each of `session_life`'s prompts, by prompt."""
    found = []
    for own in prompts:
        model = rank_cases.small_model("llama", torch.float32)
        with rank_cases.open_session(model) as s:
            with s.capture(tokens(30 + own, own)) as prefix:
                for n in (4, 2):
                    prefix.replay(tokens(n, n + own)).logps.sum().backward()
            s.finalize()
        found.append(rank_cases.flat_gradient(model))
    return found


def bfloat16_adapter():
    """dtype of the gradients and whether they are those of float32 buffers, rounded once."""
    model = tiny_model("llama", n_layers=2).to(torch.bfloat16)
    with megatron(dist_size()) as backend, LongStrawSession(model, backend=backend, chunk_tokens=16) as session:
        with session.capture(tokens(20)) as prefix:
            for n in (5, 3, 2):
                prefix.replay(tokens(n, n)).logps.sum().backward()
        session.finalize()
        trained = [p for p in model.parameters() if p.requires_grad]
        dtypes = {(p.grad.dtype, p.main_grad.dtype) for p in trained}
        rounded = all(torch.equal(p.grad, p.main_grad.bfloat16()) for p in trained)
        return dtypes, rounded, any(bool(p.grad.any()) for p in trained)


# --- the dispatcher alone ---


def dispatched(counts_by_rank, n_experts=8, dtype=torch.float64):
    """Largest differences from `ops.through_experts`: of results, gradients of rows and of weights; rows received."""
    size = dist_size()
    with megatron(size, size) as backend:
        generator = torch.Generator().manual_seed(rank())
        counts = torch.tensor(counts_by_rank[rank()])
        experts = torch.arange(n_experts).repeat_interleave(counts)
        rows = torch.randn(len(experts), 3, generator=generator, dtype=dtype)
        weights = torch.linspace(1, 2, n_experts // size * 15, dtype=dtype).view(-1, 3, 5).requires_grad_()
        received = []

        def run(arrived, per_expert):
            received.append(per_expert)
            parts = [part @ w for part, w in zip(arrived.split(per_expert), weights, strict=True)]
            return torch.cat(parts).to(torch.promote_types(dtype, torch.float32))

        found = []
        for through in (through_experts, backend.through_experts):
            leaf = rows.clone().requires_grad_()
            out = through(leaf, experts, n_experts, backend.experts, run)
            out.square().sum().backward()
            found.append((out.detach(), leaf.grad, weights.grad.clone()))
            weights.grad = None
    differences = [float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(*found, strict=True)]
    return differences, received[0] == received[1], sum(received[0]), found[0][0].dtype == found[1][0].dtype


# --- Megatron's optimizers ---


class _CudaIsCpu(TorchFunctionMode):
    """Tensors asked for on CUDA are made on the CPU, and those there call themselves CUDA tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else found


STEPS = {"lr": 0.05, "eps": 0.1, "weight_decay": 0.01}
"""An epsilon behind which the size of a gradient shows: with a small one Adam divides it out."""


def _optimize(model, session, make, n_steps=2):
    optimizer = make()
    for step in range(n_steps):
        with session.capture(tokens(30, step)) as prefix:
            for n in (4, 2):
                prefix.replay(tokens(n, n)).logps.sum().backward()
            session.finalize()
            optimizer.step()
            stale = prefix.stale
        optimizer.zero_grad()
    return rank_cases.flat_adapter(model), stale


def real_optimizer(distributed):
    """(adapter after two steps of Megatron's optimizer, digest, whether a capture turned stale, refusals)."""
    from megatron.core.optimizer import OptimizerConfig

    model = rank_cases.small_model("llama", torch.float32)
    size = dist_size()
    with ExitStack() as scope:
        backend = scope.enter_context(megatron(size, distributed_optimizer=distributed))
        session = scope.enter_context(rank_cases.open_session(model, backend=backend))
        options = {"lr": STEPS["lr"], "adam_eps": STEPS["eps"], "weight_decay": STEPS["weight_decay"]}
        config = OptimizerConfig(optimizer="adam", **options, use_distributed_optimizer=distributed, clip_grad=0.0)
        other = OptimizerConfig(optimizer="adam", **options, use_distributed_optimizer=not distributed)
        refused = [said(lambda: backend.optimizer(config)), said(lambda: backend._optimizer(other))]
        refused.append(said(lambda: backend.gradient_norm([])) if distributed else None)
        scope.enter_context(on_cpu())
        scope.enter_context(_CudaIsCpu())
        adapter, stale = _optimize(model, session, lambda: backend._optimizer(config))
        return adapter, adapter_digest(model), stale, refused


def optimizer_of_one_process(**changes):
    model = rank_cases.small_model("llama", torch.float32)
    with rank_cases.open_session(model) as session:
        trained = [p for p in model.parameters() if p.requires_grad]
        # Megatron leaves decay off vectors and biases, which LoRA has none of.
        return _optimize(model, session, lambda: torch.optim.AdamW(trained, **(STEPS | changes)))[0]


# --- the trainer ---


def train(architecture, options, folder=None):
    try:
        with finalized() as calls:
            return rank_trainers.train("ours", architecture, options | {"sharding": "megatron"}, folder), len(calls)
    finally:
        uninitialise()


# --- checkpoints ---


def _part_with_optimizer(expert_size, n_steps, seed=0):
    """This rank's part of one model, after AdamW steps on gradients that depend on the parameter's place alone."""
    model = rank_experts.own_part(rank_experts.whole_model(n_layers=4), expert_size)
    adapter = GLM52Adapter()
    adapter.experts = AccelerateBackend(expert_size, expert_size).experts
    trained = {n: p for n, p in base_model_of(model).named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.01 + seed)
    for _ in range(n_steps):
        whole = adapter.gather_shards(base_model_of(model), {n: p.detach() for n, p in trained.items()})
        given = {n: p.cos() * torch.arange(1.0, 1 + p.numel()).view_as(p) for n, p in whole.items()}
        for name, gradient in adapter.own_shards(base_model_of(model), given).items():
            trained[name].grad = gradient
        optimizer.step()
    return model, adapter, trained, optimizer


def _whole_state(model, adapter, trained, optimizer):
    """Adapter and moments of all ranks in one vector each, the step counts, and the learning rate."""
    kinds = [{n: p.detach() for n, p in trained.items()}]
    kinds += [{n: optimizer.state[p][key] for n, p in trained.items()} for key in ("exp_avg", "exp_avg_sq")]
    whole = [adapter.gather_shards(base_model_of(model), kind) for kind in kinds]
    steps = {float(optimizer.state[p]["step"]) for p in trained.values()}
    return [torch.cat([t.flatten() for t in kind.values()]) for kind in whole], steps, optimizer.param_groups[0]["lr"]


def save(folder, expert_size, with_optimizer=True):
    multiprocessing.current_process()._config["daemon"] = False  # Megatron starts a process, which daemons may not
    with megatron(expert_size, expert_size):
        made = _part_with_optimizer(expert_size, 2)
        save_sharded(folder, made[0], made[3] if with_optimizer else None)
        return _whole_state(*made)


def load(folder, expert_size):
    with megatron(expert_size, expert_size):
        model, adapter, trained, optimizer = _part_with_optimizer(expert_size, 0, seed=1)
        for p in trained.values():
            p.data.fill_(7.0)
        load_sharded(folder, model, optimizer)
        return _whole_state(model, adapter, trained, optimizer)


def load_refused(folder):
    with megatron(1):
        model, _, trained, optimizer = _part_with_optimizer(1, 0)
        missing = said(lambda: load_sharded(folder, model, optimizer))
        load_sharded(folder, model)
        factored = torch.optim.Adafactor(trained.values())
        for p in trained.values():
            p.grad = torch.ones_like(p)
        factored.step()
        return (
            missing,
            said(lambda: save_sharded(folder, model, factored)),
            said(lambda: save_sharded(folder, model, object())),
        )


# --- what is chosen and what is refused ---


def chosen():
    """Class by name of the backend that "auto" picks before, while and after parallel_state is initialised."""
    found = [type(make_backend("auto", dist_size())).__name__]
    with megatron(dist_size()):
        found.append(type(make_backend("auto", dist_size())).__name__)
    return [*found, type(make_backend("auto", dist_size())).__name__]


def refused(what):
    size = dist_size()
    if what == "other sizes":
        with megatron(size):
            return said(lambda: MegatronBackend(1))
    if what in ("tensor parallel", "tensor parallel experts"):
        parallel_state = importlib.import_module("megatron.core.parallel_state")
        split = "tensor_model_parallel_size" if what == "tensor parallel" else "expert_tensor_parallel_size"
        parallel_state.initialize_model_parallel(**{split: size}, create_gloo_process_groups=False)
        try:
            return said(lambda: MegatronBackend(1))
        finally:
            uninitialise()
    if what == "unfrozen later":
        model = tiny_model("llama", n_layers=2)
        frozen = next(p for p in model.parameters() if p.requires_grad)
        frozen.requires_grad_(False)
        with megatron(size) as backend, LongStrawSession(model, backend=backend) as session:
            frozen.requires_grad_(True)
            with session.capture(tokens(9)):
                return said(session.finalize)
    return said(lambda: MegatronBackend(*{"context": (3, 1), "experts": (1, 3)}[what]))
