"""Bytes that the ranks of a context receive from each other, by formula: what is counted must be equal."""

from __future__ import annotations

from ..adapter import adapter_for
from ..lora import base_model_of
from ..state import AttentionKVSpec, RecurrentSpec
from ..types import CausalLM, accumulation_dtype


def replay_bytes(
    model: CausalLM,
    n_ranks: int,
    response_tokens: int,
    n_responses: int,
    *,
    checkpointing: bool,
    output_travels: bool,
) -> int:
    """What each of `n_ranks` receives in the replay of a pack and its backward, however long the prompt is.

    Of models with attention to keys and values and with recurrent layers. Inputs travel in their own dtype, sums in
    the accumulation dtype.

    Args:
        n_responses: of `response_tokens` each, in one pack.
        checkpointing: backward forwards each layer again. What attention found is remembered, recurrent states travel
            again.
        output_travels: whether the operator wants attention's output beside its gradient where the pages are, as
            cuDNN's does in full scope.
    """
    base = base_model_of(model)
    dtype = base.get_input_embeddings().weight.dtype
    narrow, wide = dtype.itemsize, accumulation_dtype(dtype).itemsize
    n_tokens = n_responses * -(-response_tokens // n_ranks)
    from_each = 2 * n_tokens * wide  # log-probs and entropies
    for spec in adapter_for(base).state_specs(base):
        if isinstance(spec, AttentionKVSpec):
            q, out = (base.config.num_attention_heads * dim for dim in (spec.key_dim, spec.value_dim))
            kv, heads = spec.n_kv_heads * (spec.key_dim + spec.value_dim), base.config.num_attention_heads
            inputs = 2 * (q + kv) + out * (2 if output_travels else 1)  # forward and backward; the output's gradient
            found, gradients = out + heads, q + kv + 2 * heads  # log-sum-exp; log-sum-exp and delta
            from_each += n_tokens * (inputs * narrow + (found + gradients) * wide)
        elif isinstance(spec, RecurrentSpec):
            affine_map = spec.n_heads * spec.key_dim * (spec.key_dim + spec.value_dim) * spec.state_dtype.itemsize
            tail = spec.conv_channels * spec.conv_tail * narrow
            from_each += n_responses * (affine_map + tail) * (3 if checkpointing else 2)
    # A hash of the responses and whether all accept them; two numbers of the loss's gradient, in float64.
    return (n_ranks - 1) * (from_each + 16 + 16)
