"""One captured prompt: what a training loop holds between capture and release."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from .capture import capture_prefix, extend_prefix, why_not_extend
from .errors import (
    ConfigurationError,
    InputError,
    LifecycleError,
    StaleStateError,
    UseAfterReleaseError,
    WitnessError,
)
from .lora import adapter_state, adapters_disabled
from .out_of_memory import advise, give_back, in_smaller_packs, is_out_of_memory
from .positions import angles_key, positions_of
from .replay import pack_rows, replay_rows
from .sampling import agree_on_random_state, check_generation, generate_rows, seeded
from .session_core import SessionCore
from .state import ResidentState, Witness, in_step, min_forward_tokens
from .sweep import sweep_prefix
from .types import ReplayOutput

if TYPE_CHECKING:
    from transformers import GenerationConfig

logger = logging.getLogger(__name__)

CAPTURE_HALVINGS = 2
"""How often a capture that runs out of memory is tried with chunks of half the size: what a chunk computes is then a
quarter, and the rest is the prompt's pages, which no chunk size changes."""


class Prefix:
    """A prompt's resident state and everything that can be done with it. Obtain it from `LongStrawSession.capture`.

    Use it as a context manager: leaving the block sweeps (full scope) and releases the pages; leaving it by an
    exception releases without sweeping.
    """

    def __init__(self, core: SessionCore, prompt_ids: torch.Tensor, owner: str):
        self._core = core
        self._owner = owner
        self.prompt_ids = prompt_ids
        self._epoch = 0
        """Counts captures and extensions: a graph belongs to the state that it was made with."""
        self._capture()

    @property
    def n_tokens(self) -> int:
        """Prompt tokens P."""
        return len(self.prompt_ids)

    @property
    def released(self) -> bool:
        return self._state.released

    @property
    def n_bytes(self) -> int:
        """Bytes of resident state held now, gradient accumulators included."""
        return self._state.n_bytes

    @property
    def stale(self) -> bool:
        """Whether the weights or the positions that the capture depends on have changed since."""
        return self._moved or self._weights_key != self._core.weights_key()

    @property
    def _moved(self) -> bool:
        return self._angles_key != angles_key(self._core.bound.rotary)

    @property
    def needs_sweep(self) -> bool:
        return not self._state.released and self._state.has_gradient

    def score(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Log-probs of each response, float tensors [R_i], without a graph."""
        return [out.logps for out in self.score_with_entropy(rows)]

    @torch.no_grad()
    def score_with_entropy(self, rows: Sequence[torch.Tensor]) -> list[ReplayOutput]:
        """Like `score`, with the entropies [R_i] beside the log-probs."""
        with self._core.stats.timed("score", self._core.bound.device):
            outputs, n_tokens = self._run(rows, accumulate=False, training=False)
        self._core.stats.scored_tokens += n_tokens
        return outputs

    def replay(self, row: torch.Tensor) -> ReplayOutput:
        """Log-probs and entropies [R] of one response, with its graph. Call `backward` on a loss of them."""
        return self.replay_packed([row])[0]

    def replay_packed(self, rows: Sequence[torch.Tensor]) -> list[ReplayOutput]:
        """`replay` of several responses, packed as `replay_tokens` allows; the outputs of a pack share a graph."""
        core = self._core
        accumulate = core.gradient_scope == "full" and core.prefix_adapter == "live"
        with core.stats.timed("replay", core.bound.device):
            outputs, n_tokens = self._run(rows, accumulate=accumulate, training=True)
        core.stats.replayed_tokens += n_tokens
        core.update_is_open = core.needs_finalize = True
        for out in outputs:
            for tensor in (out.logps, out.entropy):
                tensor.register_hook(partial(self._verify_in_backward, self._epoch))
        return outputs

    def replay_in_packs(self, rows: Sequence[torch.Tensor]) -> Iterator[tuple[Sequence[int], list[ReplayOutput]]]:
        """Pack by pack as `replay_tokens` allows, the indices of its rows and their `replay`.

        Back-propagate each before you take the next. A pack whose forward runs out of memory is halved, unless other
        ranks run the same passes.
        """
        packs = pack_rows([len(row) for row in rows], self._core.replay_tokens)
        return in_smaller_packs(packs, lambda pack: self.replay_packed([rows[i] for i in pack]), self._core)

    def sample(
        self,
        n_rows: int,
        *,
        max_new_tokens: int,
        temperature: float | None = None,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> list[torch.Tensor]:
        """Draw `n_rows` responses, LongTensors [R_i], that end at the model's end-of-sequence token.

        Args:
            temperature: the session's if None; 0 decodes greedily.
            top_k, top_p: restrict the draw; the defaults leave the distribution whole, as policy gradients assume.
            seed: draw from this seed and leave the global random state alone; None uses the global one.
        """
        core = self._core
        with in_step(
            core.context, "sampling options", self._owner, n_rows, max_new_tokens, temperature, top_k, top_p, seed
        ):
            config = self._sampling_config(max_new_tokens, temperature, top_k, top_p)
        with seeded(seed, core.bound.device):
            return self.generate(n_rows, config)

    def _sampling_config(
        self, max_new_tokens: int, temperature: float | None, top_k: int, top_p: float
    ) -> GenerationConfig:
        from transformers import GenerationConfig

        stock = self._core.bound.base.generation_config
        temperature = self._core.temperature if temperature is None else temperature
        if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
            raise ConfigurationError(
                f"temperature must be a positive finite number, or 0 for greedy decoding, got {temperature!r}"
            )
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be an integer of at least 1, got {max_new_tokens!r}")
        drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p} if temperature > 0 else {}
        eos = stock.eos_token_id
        pad = stock.pad_token_id if stock.pad_token_id is not None else (eos[0] if isinstance(eos, list) else eos)
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            eos_token_id=eos,
            pad_token_id=0 if pad is None else pad,
            **drawn,
        )

    def generate(self, n_rows: int, config: GenerationConfig) -> list[torch.Tensor]:
        """`sample` under a transformers `GenerationConfig`, with all that it can express but beams."""
        core = self._core
        with in_step(core.context, "generation options", self._owner, n_rows, config.to_json_string()):
            if n_rows < 1:
                raise InputError(f"n_rows must be at least 1, got {n_rows}")
            limit, n_new = core.bound.max_positions, config.max_new_tokens
            if limit is not None and n_new is not None and self.n_tokens + n_new > limit:
                raise InputError(
                    f"a prompt of {self.n_tokens} tokens and max_new_tokens={n_new} pass the model's "
                    f"max_position_embeddings={limit}"
                )
            check_generation(config)
            self._check_usable()
        with core.stats.timed("sample", core.bound.device):
            if core.context is not None:
                agree_on_random_state(core.context, core.bound.device)
            try:
                rows = generate_rows(core.bound, self._state, self.prompt_ids, n_rows, config)
            except RuntimeError as error:
                self.advise(error, "sampling", [config.max_new_tokens or 1] * n_rows)
                raise
        core.stats.sampled_tokens += sum(len(row) for row in rows)
        return rows

    def sweep(self) -> int:
        """Turn the collected gradients of the resident state into LoRA gradients; returns the tokens swept (0 if none).

        Leaving the `with` block and `finalize()` call it; calling it early frees the accumulators early.
        """
        if not self.needs_sweep:
            return 0
        core = self._core
        with in_step(core.context, "sweep", self._owner):
            try:
                self._check_usable()
            except (StaleStateError, WitnessError) as error:
                error.add_note(
                    "The gradients collected in this prefix can no longer be swept: call session.discard() and take "
                    "the update again."
                )
                raise
            core.check_whole()
            core.bound.check_checkpointing()
        turns = nullcontext() if core.turns is None else core.turns.sweeping()
        core.half_added = f"the sweep of {self._owner} ended in an error"
        try:
            with core.stats.timed("sweep", core.bound.device), turns:
                n_tokens = sweep_prefix(core.bound, self._state)
        except RuntimeError as error:
            self.advise(error, "the sweep")
            raise
        core.half_added = None
        core.stats.swept_tokens += n_tokens
        core.n_sweeps += 1
        core.n_swept_tokens += n_tokens
        return n_tokens

    def refresh(self) -> None:
        """Capture again with the weights as they are now. Collected gradients must have been swept."""
        if self._state.released:
            raise UseAfterReleaseError("this prefix was released; capture the prompt again with session.capture()")
        if self.needs_sweep:
            raise LifecycleError("this prefix holds gradients that were not swept; call sweep() or finalize() first")
        self._epoch += 1
        self._state.release()
        self._capture()

    def extend(self, prompt_ids: torch.Tensor) -> bool:
        """Go on to a longer prompt, LongTensor [P], as a conversation does: only its new tokens are forwarded.

        Returns False if the whole prompt had to be captured, which is logged with the reason: its ids do not begin with
        those that are resident, or the weights changed since. Collected gradients must have been swept, and graphs of
        earlier replays back-propagated. Where pages live was decided when the first prompt was captured.
        """
        core = self._core
        with in_step(core.context, "prompt", self._owner, prompt_ids):
            if self._state.released:
                raise UseAfterReleaseError("this prefix was released; capture the prompt with session.capture()")
            if self.needs_sweep:
                raise LifecycleError(
                    "this prefix holds gradients that were not swept; call sweep() or finalize() first"
                )
            prompt_ids = core.bound.check_ids(prompt_ids, "prompt")
            reason = why_not_extend(core.bound, self._state, prompt_ids[:-1])
            if reason is None and self.stale:
                reason = "the weights or positions changed since it was captured"
            if torch.is_inference_mode_enabled():
                raise LifecycleError("a prompt cannot be extended in torch.inference_mode(); no_grad is fine")
            if reason is None:
                self._check_usable()
        self._epoch += 1
        self.prompt_ids = prompt_ids
        if reason is not None:
            logger.warning("the prompt of %d tokens is captured as a whole: %s", len(prompt_ids), reason)
            self._state.release()
            self._capture()
            return False
        with self._adapters(), core.stats.timed("capture", core.bound.device):
            core.stats.captured_tokens += extend_prefix(
                core.bound,
                self._state,
                prompt_ids[:-1],
                chunk_tokens=core.chunk_tokens,
                keep_boundaries=self._keeps_boundaries,
            )
        self._witness = Witness.of(self._state, with_digest=core.verify_content)
        core.update_is_open = True
        return True

    def _adapters(self) -> AbstractContextManager[None]:
        frozen = self._core.prefix_adapter == "frozen"
        return adapters_disabled(self._core.bound.base) if frozen else nullcontext()

    @property
    def _keeps_boundaries(self) -> bool:
        return self._core.gradient_scope == "full" and bool(self._adapter_state)

    def advise(self, error: BaseException, phase: str, lengths: Sequence[int] = (1,)) -> None:
        """Add what the planner advises to an `error` that says that memory ran out; others stay as they are.

        For a backward of yours; phases that run here do it themselves. `lengths` are the tokens of each response.
        """
        advise(error, self._core, phase, prompt_tokens=self.n_tokens, response_tokens=max(lengths), group=len(lengths))

    def release(self) -> None:
        """Give the pages back without sweeping. Doing so twice is allowed."""
        if self.needs_sweep and self._core.half_added is None:
            self._core.half_added = f"{self._owner} was released before what its replays collected was swept"
        if not self._state.released:
            self._state.release()

    def __enter__(self) -> Prefix:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.sweep()
        finally:
            self.release()

    def _capture(self) -> None:
        if torch.is_inference_mode_enabled():
            raise LifecycleError(
                "a prompt cannot be captured in torch.inference_mode(), whose tensors carry no version counter to "
                "witness; capture outside of it (no_grad is fine)"
            )
        core = self._core
        with self._adapters(), core.stats.timed("capture", core.bound.device):
            self._adapter_state = adapter_state(core.bound.base)
            self._state = self._captured()
        core.stats.captured_tokens += len(self.prompt_ids) - 1
        self._weights_key = core.weights_key()
        self._positions = positions_of(core.bound.base)
        self._angles_key = angles_key(core.bound.rotary)
        self._witness = Witness.of(self._state, with_digest=core.verify_content)
        core.update_is_open = True

    def _captured(self) -> ResidentState:
        core = self._core
        for n_left in range(CAPTURE_HALVINGS, -1, -1):
            smaller = core.chunk_tokens // 2
            try:
                return capture_prefix(
                    core.bound,
                    self.prompt_ids[:-1],
                    core.pool,
                    self._owner,
                    chunk_tokens=core.chunk_tokens,
                    placement=core.placement,
                    context=core.context,
                    keep_boundaries=self._keeps_boundaries,
                )
            except RuntimeError as error:
                least = min_forward_tokens(core.bound.specs)
                if not (is_out_of_memory(error) and core.is_alone and n_left and smaller >= least):
                    self.advise(error, "capture")
                    raise
            give_back(core)  # outside of the handler, whose traceback holds what the chunk had computed
            logger.warning(
                "out of memory in the capture of %d tokens: chunks are of %d tokens from now on, not %d",
                self.n_tokens,
                smaller,
                core.chunk_tokens,
            )
            core.chunk_tokens = smaller
        raise AssertionError("the last attempt returns or raises")

    def _check_usable(self) -> None:
        if self._state.released:
            raise UseAfterReleaseError(
                f"this prefix of {self.n_tokens} tokens was released; capture the prompt again, and keep sampling, "
                "scoring, replay and backward inside its `with` block"
            )
        self._check_positions()
        if self.stale:
            raise StaleStateError(
                "the weights changed since this prompt was captured, so its state no longer belongs to them; call "
                'prefix.refresh() or capture again after each optimizer step, or use prefix_adapter="frozen"'
            )
        active = adapter_state(self._core.bound.base)
        if self._core.prefix_adapter == "live" and active != self._adapter_state:
            raise StaleStateError(
                f"the prompt was captured with adapters {self._adapter_state or 'off'}, but {active or 'none'} "
                "are active now; capture once per adapter"
            )
        self._witness.verify(self._state)

    def _check_positions(self) -> None:
        if self._moved:
            then, now = (
                "the model's own" if positions is None else positions.to_json()
                for positions in (self._positions, positions_of(self._core.bound.base))
            )
            raise StaleStateError(
                f"this prompt was captured at positions {then}, but now they are {now}, or their frequencies were "
                "written to; extend positions before the capture and keep them until its last use, or capture again"
            )

    def _check_trainable(self) -> None:
        core = self._core
        if not torch.is_grad_enabled():
            raise LifecycleError(
                "replay builds a graph, but gradients are disabled here; use score() for log-probs only"
            )
        if not adapter_state(core.bound.base):
            raise ConfigurationError("replay has nothing to train: the LoRA adapter is disabled; use score() instead")
        core.bound.check_checkpointing()
        sums = core.context is not None or core.turns is not None
        if sums and not core.needs_finalize and core.bound.has_gradient():
            raise LifecycleError(
                "the model still holds the gradient of an earlier update, which finalize() has summed over the ranks "
                "already and would sum again; call optimizer.zero_grad() after each step, before the next replay"
            )

    def _run(self, rows: Sequence[torch.Tensor], *, accumulate: bool, training: bool) -> tuple[list[ReplayOutput], int]:
        core = self._core
        with in_step(core.context, "responses", self._owner, training, *rows):
            if training:
                self._check_trainable()
            rows = [core.bound.check_ids(row, f"response {i}", self.n_tokens) for i, row in enumerate(rows)]
            self._check_usable()
            if training:
                core.check_whole()
            packs = pack_rows([len(row) for row in rows], core.replay_tokens)
            if training and core.turns is not None and len(packs) > 1:
                raise ConfigurationError(
                    f"{len(rows)} responses make {len(packs)} packs, but with expert_parallel_size above "
                    "context_parallel_size the backward of a pack must run before the next: replay them one by one, or "
                    "in packs that replay_tokens can hold"
                )

        def run(pack: Sequence[int]) -> list[ReplayOutput]:
            return replay_rows(
                core.bound,
                self._state,
                self.prompt_ids[-1],
                [rows[i] for i in pack],
                accumulate=accumulate,
                temperature=core.temperature,
            )

        outputs: dict[int, ReplayOutput] = {}
        try:
            # The graphs of all packs live together, so that halves of one would hold no less.
            ran = ((pack, run(pack)) for pack in packs) if training else in_smaller_packs(packs, run, core)
            for pack, results in ran:
                outputs |= dict(zip(pack, results, strict=True))
        except RuntimeError as error:
            self.advise(error, "replay" if training else "scoring", [len(row) for row in rows])
            raise
        self._witness.verify(self._state)
        return [outputs[i] for i in range(len(rows))], sum(len(row) for row in rows)

    def _verify_in_backward(self, epoch: int, gradient: torch.Tensor) -> None:
        if self._core.turns is not None:
            self._core.turns.backward_began()
        if self._state.released:
            raise UseAfterReleaseError(
                "backward ran after its prefix was released; call it inside the prefix's `with` block"
            )
        if epoch != self._epoch:
            raise StaleStateError(
                "backward ran after its prefix was extended or captured again; call it before extend() and refresh()"
            )
        self._check_positions()  # a checkpointed layer runs again now
        self._witness.verify(self._state)
        core = self._core
        if core.half_added is None:
            core.half_added = "a backward ended in an error"
            # Runs when the whole backward has, and not at all when it raises.
            torch.autograd.Variable._execution_engine.queue_callback(core.backward_ended)
