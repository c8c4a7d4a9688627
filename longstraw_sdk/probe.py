"""The start-up probe: proof, on a few tokens, that this model replayed is this model.

It catches what no structural check can: a forward that ignores the cache (the response log-probs then do not move with
the prompt) and logits that are scaled or capped after the head (they then differ from the stock forward).
"""

from __future__ import annotations

import torch

from .bound import BoundModel
from .capture import capture_prefix
from .environment import without_kernels
from .errors import NumericsError, UnsupportedModelError
from .replay import replay_rows
from .state import PagePool

_N_PROMPT, _N_RESPONSE = 9, 4
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-2}
"""Largest log-prob difference (nats) to the stock forward that rounding explains; 0.5 for 16-bit dtypes. Losing the
prompt or the scale of the logits costs whole nats on a trained model."""


@torch.no_grad()
def probe(bound: BoundModel) -> None:
    """Raise `UnsupportedModelError` if replay ignores the prompt or disagrees with the stock forward."""
    if bound.max_positions is not None and bound.max_positions < _N_PROMPT + _N_RESPONSE:
        return
    ids = torch.arange(3, 3 + 7 * (_N_PROMPT + _N_RESPONSE), 7, device=bound.device) % bound.vocab_size
    prompt, response = ids[:_N_PROMPT], ids[_N_PROMPT:]
    replayed = _replay(bound, prompt, response)
    other = prompt.clone()
    other[1] = (other[1] + 1) % bound.vocab_size
    if torch.equal(replayed, _replay(bound, other, response)):
        raise UnsupportedModelError(
            "changing a prompt token did not move the response's log-probs, so the replay does not see the prompt; "
            "check the transformers version and the adapter"
        )
    with without_kernels():  # the model's own modules use them, and would share their faults
        logits = bound.base(input_ids=ids[None], use_cache=False).logits[0, _N_PROMPT - 1 : -1]
    stock = torch.log_softmax(logits.to(replayed.dtype), -1).gather(-1, response[:, None])[:, 0]
    if not bool(stock.isfinite().all() and replayed.isfinite().all()):
        raise NumericsError("the model's own log-probs on a short probe are not finite; check the weights and dtype")
    gap = float((stock - replayed).abs().max())
    allowed = _TOLERANCE.get(bound.base.dtype, 0.5)
    if gap > allowed:
        raise UnsupportedModelError(
            f"replayed log-probs differ from the stock forward by {gap:.3g} nats on a short probe (allowed for "
            f"{bound.base.dtype}: {allowed}); the adapter misses something that this model does"
        )


def _replay(bound: BoundModel, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    pool = PagePool(page_tokens=4)
    state = capture_prefix(bound, prompt[:-1], pool, "probe", chunk_tokens=5, keep_boundaries=False)
    try:
        return replay_rows(bound, state, prompt[-1], [response], accumulate=False, temperature=1.0)[0].logps
    finally:
        state.release()
