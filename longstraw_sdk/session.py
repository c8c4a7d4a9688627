"""The session: capture a prompt, sample, score and replay responses from it, finalize once, step once."""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from functools import partial
from types import TracebackType
from typing import get_args

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import environment
from .adapter import ResidentStateAdapter, adapter_for
from .backends import ShardingBackend, make_backend
from .bound import BoundModel, bind_model
from .errors import ConfigurationError, LifecycleError, NumericsError, require_at_least
from .lora import LoRACoverage, base_model_of, lora_coverage, require_trainable_lora
from .out_of_memory import give_back
from .positions import PositionConfig, asked_positions, positions_identity, positions_of
from .prefix import Prefix
from .probe import probe as run_probe
from .session_core import SessionCore, SessionStats
from .state import KEPT_FREE, CudaLink, PagePool, Placement, check_same_weights, cuda_room, in_step, min_forward_tokens
from .turns import ExpertTurns
from .types import CausalLM, FinalizeResult, GradientScope, PrefixAdapter, StateDevice

logger = logging.getLogger(__name__)


class LongStrawSession:
    """Binds a LoRA model and runs GRPO's inner loop on very long prompts.

    Args:
        model: a causal LM with LoRA (a `PeftModel`, or a model with PEFT layers injected).
        adapter: how to run the architecture; None picks it by `config.model_type`.
        gradient_scope: "full" is the gradient of conventional autograd, through the prompt; "response" treats the
            prompt's state as a constant, as published in arXiv 2607.14952, which is a different gradient.
        prefix_adapter: "live" lets LoRA act on the prompt, so a capture is stale after an optimizer step; "frozen"
            switches it on from the last prompt token only, so a capture outlives steps and both scopes are exact.
        chunk_tokens: prompt tokens per forward in capture and sweep, at least 2 if the model has recurrent layers.
            Results do not depend on it.
        page_tokens: rows per page of resident state. Results do not depend on it.
        backend: how gradients of several processes are reduced: "local", "accelerate" or "megatron" (under `accelerate
            launch` or `torchrun`), or a `ShardingBackend`; None picks by what is launched.
        context_parallel_size: consecutive ranks that share a prompt. They call everything with the same arguments and
            hold 1/size of its pages each; `finalize()` sums their gradients.
        expert_parallel_size: consecutive ranks that hold one set of experts together; each was given its part of them
            when the model was loaded. Where they are more than a context, contexts run their passes together, and the
            backward of a replay must run before the next pass.
        replay_tokens: how many response tokens one packed replay may hold; None replays one response at a time, which
            keeps memory independent of the group size.
        temperature: divides the logits in sampling, scoring and replay alike.
        state_device: where pages live. "cpu" beside a model on a GPU keeps them in pinned host memory and stages one
            layer at a time while the layer before computes. "auto" is the model's device, but on a GPU a prompt whose
            pages and gradients leave less free than chunks and packs need keeps as many layers in host memory as it
            takes.
        positions: extends the model's positions by YaRN until the session closes; see `PositionConfig`. None takes what
            the environment variable LONGSTRAW_POSITIONS says, and leaves the model as it is where that is not set.
            Sampling from a prefix runs the same modules; for another sampler see `vllm_arguments`.
        verify_content: let the witness hash the pages' content too, which finds writes through raw pointers.
        probe: run the start-up probe on a few tokens; `poison` fills free pages with NaN. Both are for trust, not
            for results.

    Raises:
        UnsupportedModelError: the adapter cannot serve the model; the message lists why.
        ConfigurationError: an option or the LoRA set-up cannot work.
        LifecycleError: the model is bound by another session.
    """

    def __init__(
        self,
        model: CausalLM,
        adapter: ResidentStateAdapter | None = None,
        *,
        gradient_scope: GradientScope = "full",
        prefix_adapter: PrefixAdapter = "live",
        chunk_tokens: int = 8192,
        page_tokens: int = 4096,
        backend: ShardingBackend | str | None = None,
        context_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        replay_tokens: int | None = None,
        temperature: float = 1.0,
        state_device: StateDevice = "auto",
        positions: PositionConfig | None = None,
        verify_content: bool = False,
        probe: bool = True,
        poison: bool = False,
    ):
        _one_of("gradient_scope", gradient_scope, get_args(GradientScope))
        _one_of("prefix_adapter", prefix_adapter, get_args(PrefixAdapter))
        _one_of("state_device", state_device, get_args(StateDevice))
        require_at_least("page_tokens", page_tokens, 1)
        if replay_tokens is not None:
            require_at_least("replay_tokens", replay_tokens, 1)
        if not _is_number(temperature) or not 0 < temperature < math.inf:
            raise ConfigurationError(f"temperature must be a positive finite number, got {temperature!r}")
        require_trainable_lora(model)
        self.adapter = adapter_for(base_model_of(model)) if adapter is None else adapter
        self.backend = _backend(backend, context_parallel_size, expert_parallel_size)
        context = self.backend.context
        if context is not None and not self.adapter.context_parallel:
            raise ConfigurationError(
                f"{type(self.adapter).__name__} cannot split a prompt over {context.size} ranks; use "
                "context_parallel_size=1, where every rank has prompts of its own"
            )
        if self.backend.experts is not None and not self.adapter.expert_parallel:
            raise ConfigurationError(
                f"{type(self.adapter).__name__} cannot spread experts over ranks; use expert_parallel_size=1"
            )
        self.adapter.experts = self.backend.experts
        self.adapter.through_experts = self.backend.through_experts
        bound: BoundModel | None = None
        options = (
            type(self.adapter).__name__,
            gradient_scope,
            prefix_adapter,
            chunk_tokens,
            page_tokens,
            replay_tokens,
            temperature,
            positions,
            *environment.asked_for(),
        )
        try:
            with in_step(self.backend.world, "session options", *options):
                environment.check()
                bound = bind_model(model, self.adapter, asked_positions(positions))
                if context is not None:
                    context.check_device(bound.device)
                require_at_least("chunk_tokens", chunk_tokens, min_forward_tokens(bound.specs))
                placement = _placement(state_device, bound.device, gradient_scope)
                bound.check_checkpointing()
                if probe:
                    run_probe(bound)
            check_same_weights(self.backend.world, bound.base)
            self.backend.share_parameters(bound.trained)
            detach = self.backend.attach(bound.base)
        except BaseException:
            if bound is not None:
                bound.unbind()
            raise
        self._core = SessionCore(
            bound=bound,
            pool=PagePool(page_tokens, poison=poison),
            gradient_scope=gradient_scope,
            prefix_adapter=prefix_adapter,
            chunk_tokens=chunk_tokens,
            replay_tokens=replay_tokens,
            temperature=temperature,
            verify_content=verify_content,
            placement=placement,
            context=context,
        )
        # A session that is dropped without close() must not leave its model bound, once its prefixes are gone too.
        guard = register_optimizer_step_pre_hook(_Unfinished(self._core))
        experts = self.backend.experts
        turns: ExpertTurns | None = None
        if experts is not None and experts.size > (1 if context is None else context.size):
            turns = self._core.turns = ExpertTurns(experts, bound, self._core.pool, context)

        def undo() -> None:
            guard.remove()
            if turns is not None:
                turns.close()
            detach()
            bound.unbind()

        self._unbind = weakref.finalize(self._core, undo)
        self._open: list[Prefix] = []
        self._n_prefixes = 0
        self._numbers = itertools.count()
        self._log_start()

    @property
    def gradient_scope(self) -> GradientScope:
        return self._core.gradient_scope

    @property
    def prefix_adapter(self) -> PrefixAdapter:
        return self._core.prefix_adapter

    @property
    def stats(self) -> SessionStats:
        """Running totals of tokens and seconds per phase."""
        return self._core.stats

    @property
    def has_open_update(self) -> bool:
        """Whether anything was captured or replayed since the last `finalize()`."""
        return self._core.update_is_open

    def open_anywhere(self) -> bool:
        """Whether any rank has an open update. Every rank calls it."""
        world, is_open = self.backend.world, self._core.update_is_open
        return is_open if world is None else not world.agree(not is_open)

    @property
    def pool(self) -> PagePool:
        return self._core.pool

    @property
    def bound(self) -> BoundModel:
        return self._core.bound

    @property
    def positions_identity(self) -> str:
        """What `require_same_positions` compares with a sampler's."""
        return positions_identity(self._core.bound.base.config)

    def capture(self, prompt_ids: torch.Tensor) -> Prefix:
        """Capture one prompt, LongTensor [P] with P >= 1, and return its `Prefix`."""
        with in_step(self._core.context, "prompt", prompt_ids):
            self._check_open()
            prompt_ids = self._core.bound.check_ids(prompt_ids, "prompt")
        prefix = Prefix(self._core, prompt_ids, f"prompt {next(self._numbers)}")
        self._open = [p for p in self._open if not p.released] + [prefix]
        self._n_prefixes += 1
        return prefix

    def finalize(self) -> FinalizeResult:
        """Close the update: sweep what is still open, reduce the gradient across processes once. Then step.

        Every rank calls it, also one that had no prompt. Raises `LifecycleError` if nothing was captured or replayed
        since the last call, on any rank, or if a backward or sweep of this update ended in an error; `NumericsError`,
        on every rank, if the gradient is not finite. Then `discard()` is the way on.
        """
        self._check_open()
        core = self._core
        core.check_whole()
        self.join()
        if not self.open_anywhere():
            raise LifecycleError(
                "finalize() was called, but nothing was captured or replayed since the last one; call it once per "
                "optimizer step, before optimizer.step()"
            )
        for prefix in self._open:
            prefix.sweep()
        self.join()
        reductions = self.backend.reduce_gradients(core.bound.trained, replayed=core.needs_finalize)
        self._check_finite()
        result = FinalizeResult(self._n_prefixes, core.n_sweeps, core.n_swept_tokens, reductions)
        core.update_is_open = core.needs_finalize = False
        self._n_prefixes = core.n_sweeps = core.n_swept_tokens = 0
        return result

    def discard(self) -> None:
        """Give the open update up, for instance after an error: gradients become None, and prefixes are released.

        Then it can be taken again from its first capture. Every rank of a run calls it. Does nothing to weights and
        optimizer, and may be called at any time outside of a backward pass.
        """
        core = self._core
        for prefix in self._open:
            prefix.release()
        for p in core.bound.trained:
            p.grad = None
        core.update_is_open = core.needs_finalize = False
        core.half_added = None
        self._open = []
        self._n_prefixes = core.n_sweeps = core.n_swept_tokens = 0
        give_back(core)

    def join(self) -> None:
        """Serve contexts that share experts with this one until all have joined; `finalize()` does so.

        Needed before collectives of your own, where `expert_parallel_size` is above `context_parallel_size`: a rank
        that waits there would not answer ranks that still sample, score or replay. Elsewhere it returns at once.
        """
        if self._core.turns is not None:
            self._core.turns.join()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` after `finalize()`, with the norm [] of the whole model on every rank.

        Every rank calls it. The torch function does not know of experts on other ranks.
        """
        trained = self._core.bound.trained
        norm = self.backend.gradient_norm(trained)
        torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
        return norm

    def trim(self) -> int:
        """Give memory that holds no page in use back to its device, and return its bytes."""
        return self._core.pool.trim()

    def mark_weights_updated(self) -> None:
        """Declare live captures stale. Needed only after optimizers that PyTorch's version counters do not see."""
        self._core.weights_epoch += 1

    def coverage(self) -> LoRACoverage:
        """Which linears of each layer kind carry trainable LoRA."""
        bound = self._core.bound
        kinds: dict[int, str] = {}
        for spec in bound.specs:
            kinds.setdefault(spec.layer, spec.kind)
        return lora_coverage(bound.base, kinds, bound.adapter.no_gradient)

    def close(self) -> None:
        """Release every prefix without sweeping and unbind the model. Doing so twice is allowed."""
        if self._unbind.alive:
            for prefix in self._open:
                prefix.release()
            self._core.pool.trim()
            self._unbind()

    def __enter__(self) -> LongStrawSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_finite(self) -> None:
        core, world = self._core, self.backend.world
        gradients = [p.grad for p in core.bound.trained if p.grad is not None]
        finite = not gradients or bool(torch.stack([g.isfinite().all() for g in gradients]).all())
        if not (finite if world is None else world.agree(finite)):
            core.half_added = "the reduced gradient is not finite"
            named = core.bound.base.named_parameters()
            wrong = [n for n, p in named if p.grad is not None and not bool(p.grad.isfinite().all())]
            where = (
                f"{len(wrong)} of {len(gradients)} trained parameters, {', '.join(wrong[:3])} first" if wrong else ""
            )
            raise NumericsError(
                f"the gradient of this update is NaN or infinite in {where}; nothing "
                "was stepped. Check advantages, old log-probs and the loss for infinities, and the learning rate; then "
                "session.discard() and take the update again, or go back to the last checkpoint"
            )

    def _check_open(self) -> None:
        if not self._unbind.alive:
            raise LifecycleError("this session is closed; make a new LongStrawSession")

    def _log_start(self) -> None:
        core = self._core
        meaning = {
            "full": "exact gradient through the prompt",
            "response": "the prompt's state is a constant (arXiv 2607.14952)",
        }[core.gradient_scope]
        if core.prefix_adapter == "frozen":
            meaning = "LoRA acts from the last prompt token on; exact"
        logger.info(
            "%s: gradient_scope=%s (%s), prefix_adapter=%s, chunk_tokens=%d, page_tokens=%d",
            type(self.adapter).__name__,
            core.gradient_scope,
            meaning,
            core.prefix_adapter,
            core.chunk_tokens,
            core.pool.page_tokens,
        )
        extension = positions_of(core.bound.base)
        if extension is not None:
            logger.info("positions are extended to %d by %s", extension.max_positions, extension.to_json())
        for row in self.coverage().missing:
            logger.warning(
                "LoRA is missing on %s in %d of %d %s layers",
                row.linear,
                row.n_layers - row.n_with_lora,
                row.n_layers,
                row.layer_kind,
            )


class _Unfinished:
    """Refuses an optimizer step on gradients that were replayed but not finalized. Holds no session alive."""

    def __init__(self, core: SessionCore):
        self.core = weakref.ref(core)

    def __call__(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        core = self.core()
        if core is None or not core.needs_finalize:
            return
        trained = {id(p) for p in core.bound.trained}
        if any(id(p) in trained for group in optimizer.param_groups for p in group["params"]):
            raise LifecycleError(
                "optimizer.step() was called on gradients that are not closed: responses were replayed since the last "
                "finalize(), which sweeps the prompts and reduces the gradient over the ranks; call session.finalize() "
                "first"
            )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r} is not known; allowed: {', '.join(map(repr, allowed))}")


def _backend(
    backend: ShardingBackend | str | None, context_parallel_size: int, expert_parallel_size: int
) -> ShardingBackend:
    sizes = {"context_parallel_size": context_parallel_size, "expert_parallel_size": expert_parallel_size}
    for name, size in sizes.items():
        require_at_least(name, size, 1)
    if backend is None or isinstance(backend, str):
        return make_backend(backend or "auto", context_parallel_size, expert_parallel_size)
    for (name, size), group in zip(sizes.items(), (backend.context, backend.experts), strict=True):
        found = 1 if group is None else group.size
        if size not in (1, found):
            raise ConfigurationError(
                f"{name}={size}, but the given {type(backend).__name__} was made with {found}; make it with the size "
                "you want"
            )
    return backend


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _placement(state_device: str, model_device: torch.device, gradient_scope: GradientScope) -> Placement:
    if state_device == model_device.type or (state_device == "auto" and model_device.type != "cuda"):
        return Placement(model_device)
    if state_device in ("auto", "cpu") and model_device.type == "cuda":
        room = partial(cuda_room, model_device, KEPT_FREE[gradient_scope]) if state_device == "auto" else None
        return Placement(torch.device("cpu"), CudaLink(model_device), room)
    raise ConfigurationError(
        f"state_device={state_device!r} cannot serve a model on {model_device}: pages live beside the model, or in "
        'host memory beside a GPU. Use "auto", or "cpu" with the model on a GPU'
    )
