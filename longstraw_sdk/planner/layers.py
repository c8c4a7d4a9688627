"""Ledgers of layers with softmax attention, of Gated DeltaNet layers and of what surrounds them.

They follow the modelling files of transformers 5.24 and the operators of `ops`; `tests/test_planner.py` compares them
with what really lived.
"""

from __future__ import annotations

from typing import Any

from .attention_work import attention_work, attention_work_back
from .ledger import Ledger, Sized
from .passes import Numbers, Pass

SCAN_CHUNK = 64
"""Tokens that the Gated DeltaNet scan takes at once, in plain PyTorch and in flash-linear-attention."""


def lora_linear(book: Ledger, x: Sized, n_in: int, n_out: int, run: Pass, num: Numbers) -> Sized:
    """A frozen linear and its LoRA side product."""
    n, r = run.n_tokens, num.lora_rank
    inner, factors = n * r, (n_in + n_out) * r
    if num.narrow:  # ops/lora_linear.py: casts of both factors stay for the backward
        return book.op(
            n * n_out * num.model,
            x,
            saves=(x,),
            extra=(inner + factors) * num.model,
            back_work=inner * num.model + factors * num.sums,
        )
    # PEFT's: base, B(A(x)), its product with the scale, and their sum.
    wide = n * n_out * num.model
    side = book.op(wide, x, saves=(x,), extra=inner * num.model, work=2 * wide, back_work=x.n_bytes)
    return book.op(wide, side, passes=True)


def rms_norm(book: Ledger, x: Sized, n_elements: int, n_vectors: int, num: Numbers, *, fused: bool) -> Sized:
    if fused:
        return book.op(n_elements * num.model, x, saves=(x,), extra=n_vectors * 4)
    wide = n_elements * num.sums
    if num.narrow:
        copy = book.op(wide, x)
        out = book.op(wide, copy, saves=(copy,), extra=n_vectors * num.sums, work=wide, back_work=2 * wide)
        return book.op(n_elements * num.model, out, back_work=wide)
    out = book.op(wide, x, saves=(x,), extra=n_vectors * num.sums, back_work=2 * wide)
    return book.op(wide, out)


def mlp(book: Ledger, x: Sized, config: Any, width: int, run: Pass, num: Numbers) -> Sized:
    """down(silu(gate(x)) * up(x))."""
    hidden = config.hidden_size
    gate, up = (lora_linear(book, x, hidden, width, run, num) for _ in range(2))
    size = run.n_tokens * width * num.model
    if num.fused and config.model_type == "qwen3_5_text":
        inner = book.op(size, gate, up, saves=(gate, up))
    else:
        active = book.op(size, gate, saves=(gate,))
        inner = book.op(size, active, up, saves=(active, up))
    return lora_linear(book, inner, width, hidden, run, num)


def residual_mlp(book: Ledger, x: Sized, mixed: Sized, config: Any, run: Pass, num: Numbers) -> Sized:
    """The second half of a decoder layer: both residual sums, the norm and the MLP."""
    n, hidden = run.n_tokens, config.hidden_size
    joined = book.op(n * hidden * num.model, x, mixed, passes=True)
    fused = num.fused and config.model_type == "qwen3_5_text"
    normed = rms_norm(book, joined, n * hidden, n, num, fused=fused)
    out = mlp(book, normed, config, config.intermediate_size, run, num)
    return book.op(n * hidden * num.model, joined, out, passes=True)


def attention_layer(config: Any, run: Pass, num: Numbers, *, unused: bool) -> Ledger:
    """A decoder layer with softmax attention; `unused` if only its keys and values are wanted."""
    n, hidden, e = run.n_tokens, config.hidden_size, num.model
    gated = config.model_type == "qwen3_5_text"
    normed_heads = gated or config.model_type == "qwen3"
    n_heads, n_kv = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or hidden // n_heads
    fused = num.fused and gated
    book = Ledger(n * hidden * e)
    x = book.x
    normed = rms_norm(book, x, n * hidden, n, num, fused=fused)
    q = lora_linear(book, normed, hidden, n_heads * dim * (1 + gated), run, num)
    gate = q
    if gated:
        gate = book.op(n * n_heads * dim * e, q)  # a reshape of every other half, which copies
    if normed_heads:
        q_in = q if not fused else book.op(n * n_heads * dim * e, q)  # the kernel asks for contiguous heads
        q = rms_norm(book, q_in, n * n_heads * dim, n * n_heads, num, fused=fused)
    k = lora_linear(book, normed, hidden, n_kv * dim, run, num)
    if normed_heads:
        k = rms_norm(book, k, n * n_kv * dim, n * n_kv, num, fused=fused)
    v = lora_linear(book, normed, hidden, n_kv * dim, run, num)
    q_size, kv_size = n * n_heads * dim * e, n * n_kv * dim * e
    turned_q = book.op(q_size, q, work=2 * q_size, back_work=q_size)
    turned_k = book.op(kv_size, k, work=2 * kv_size, back_work=kv_size)
    book.produce(turned_k, v)
    if unused:
        out = book.op(q_size, turned_q, constant=True)
    else:
        sizes = (n_heads, n_kv, dim, run, num)
        out = book.op(
            q_size,
            turned_q,
            turned_k,
            v,
            saves=(turned_q, turned_k, v),
            extra=n * n_heads * 4,
            work=attention_work(*sizes),
            back_work=attention_work_back(*sizes),
            once=True,
        )
        book.recall(out.n_bytes, n * n_heads * 4)
        book.save(out)
        book.hold(turned_q, turned_k, v, q, k)
        out = book.op(q_size, out)
    if gated:
        open_ = book.op(q_size, gate)
        out = book.op(q_size, out, open_, saves=(out, open_), back_work=q_size)
    mixed = lora_linear(book, out, n_heads * dim, hidden, run, num)
    residual_mlp(book, x, mixed, config, run, num)
    return book


def delta_layer(config: Any, run: Pass, num: Numbers) -> Ledger:
    """A decoder layer of Gated DeltaNet (Qwen3.5 and Qwen3.6)."""
    n, hidden, e, a = run.n_tokens, config.hidden_size, num.model, num.sums
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    n_heads, dim_v = config.linear_num_value_heads, config.linear_value_head_dim
    values = n_heads * dim_v
    channels = 2 * keys + values
    tail = config.linear_conv_kernel_dim - 1
    state = run.n_rows * n_heads * config.linear_key_head_dim * dim_v * a
    book = Ledger(n * hidden * e)
    x = book.x
    fused = num.fused
    normed = rms_norm(book, x, n * hidden, n, num, fused=fused)
    columns = lora_linear(book, normed, hidden, channels, run, num)
    padded = run.n_rows * tail * channels * e
    end_tail = book.op(padded, columns)
    book.produce(end_tail)
    if fused:
        mixed = book.op(n * channels * e, columns, saves=(columns,))
    else:
        joined = book.op(n * channels * e + padded, columns)
        convolved = book.op(joined.n_bytes + padded, joined, saves=(joined,))
        mixed = book.op(joined.n_bytes, convolved, saves=(convolved,), back_work=convolved.n_bytes)
    z = lora_linear(book, normed, hidden, values, run, num)
    b, raw = (lora_linear(book, normed, hidden, n_heads, run, num) for _ in range(2))
    gates = n * n_heads
    beta = book.op(gates * e, b)
    book.save(beta)
    decay = book.op(gates * a, raw, extra=gates * a, work=2 * gates * a)
    if fused:
        scanned = _fused_scan(book, mixed, beta, decay, config, run, num)
    else:
        if run.ranks > 1:  # once more, over values widened by zeros, for the map of the slice
            end = _plain_scan(book, mixed, beta, decay, config, run, num, config.linear_key_head_dim + dim_v)
            mixed = book.op(mixed.n_bytes, mixed, end, passes=True)
        scanned = _plain_scan(book, mixed, beta, decay, config, run, num, dim_v)
    end_state = book.op(state, scanned, constant=True)
    book.produce(end_state)
    book.hold(columns, mixed, z, beta, decay)
    if fused:
        gated = book.op(n * values * e, scanned, z, saves=(scanned, z), extra=gates * 4)
    else:
        copy = book.op(n * values * a, scanned) if num.narrow else scanned
        wide_z = book.op(n * values * a, z) if num.narrow else z
        weighed = book.op(n * values * e, copy, saves=(copy,), extra=gates * a, work=2 * n * values * a)
        active = book.op(n * values * a, wide_z, saves=(wide_z,))
        gated = book.op(n * values * e, weighed, active, saves=(weighed, active))
    mixed = lora_linear(book, gated, values, hidden, run, num)
    residual_mlp(book, x, mixed, config, run, num)
    return book


def _fused_scan(book: Ledger, mixed: Sized, beta: Sized, decay: Sized, config: Any, run: Pass, num: Numbers) -> Sized:
    """flash-linear-attention's kernel: normalised queries and keys, and each chunk's triangular system, are kept."""
    n, e = run.n_tokens, num.model
    n_heads, dim_k, dim_v = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    keys = config.linear_num_key_heads * dim_k
    states = n / SCAN_CHUNK * n_heads * dim_k * dim_v * e
    rows = n * n_heads * (dim_k + 2 * dim_v) * e  # w, u and the corrected values
    return book.op(
        n * n_heads * dim_v * e,
        mixed,
        beta,
        decay,
        saves=(mixed, beta),
        extra=2 * n * keys * e + n * n_heads * (SCAN_CHUNK * e + 4),
        work=states + rows,
        back_work=2 * (states + rows),
    )


def _plain_scan(
    book: Ledger, mixed: Sized, beta: Sized, decay: Sized, config: Any, run: Pass, num: Numbers, dim_v: int
) -> Sized:
    """`torch_chunk_gated_delta_rule`."""
    a, e, n_heads, dim_k = num.sums, num.model, config.linear_num_value_heads, config.linear_key_head_dim
    width = -(-run.width // SCAN_CHUNK) * SCAN_CHUNK
    n, n_chunks = run.n_rows * width, width // SCAN_CHUNK
    keys, values, gates = n * n_heads * dim_k * a, n * n_heads * dim_v * a, n * n_heads * a
    pairs = n * n_heads * SCAN_CHUNK * a
    q, k = (book.op(keys * e / a, mixed, back_work=mixed.n_bytes) for _ in range(2))
    v = mixed
    if num.narrow:
        q, k, v = book.op(keys, q), book.op(keys, k), book.op(values, mixed)
    q_in, k_in = q, k
    q = book.op(keys, q_in, saves=(q_in,), extra=gates)
    q = book.op(keys, q)
    k = book.op(keys, k_in, saves=(k_in,), extra=gates)
    q, k, v = book.op(keys, q), book.op(keys, k), book.op(values, v)
    strength, fall = book.op(gates, beta), book.op(gates, decay)
    v_beta = book.op(values, v, strength, saves=(v, strength))
    k_beta = book.op(keys, k, strength, saves=(k,))
    falls = book.op(gates, fall)
    apart = book.op(pairs, falls, work=pairs)
    apart = book.op(pairs, apart)
    book.save(apart)
    copies = 2 * keys if run.width % SCAN_CHUNK == 0 and n_chunks > 1 else 0.0
    product = book.op(pairs, k_beta, k, saves=(k_beta, k), extra=copies)
    system = book.op(pairs, product, apart, saves=(product, apart))
    attended = book.op(pairs, q, k, saves=(q,), extra=copies)
    attended = book.op(pairs, attended, apart, saves=(attended,))
    k_fallen = book.op(keys, k_beta, falls, extra=gates)
    new = book.op(values, system, v_beta, saves=(system,))
    book.save(new)
    known = book.op(keys, system, k_fallen)
    book.save(known)
    out = book.op(values, new)
    q_late = book.op(keys, q, falls, extra=gates)
    k_late = book.op(keys, k, falls, extra=gates)
    states = n_chunks * run.n_rows * n_heads * dim_k * dim_v * a
    # The gradient of each chunk's part comes padded to the whole, and is added to the sum of those before it.
    padded = 2 * pairs + 3 * values if n_chunks > 1 else 0.0
    scanned = book.op(
        0.0, out, attended, new, known, q_late, k_late,
        saves=(attended, known, q_late, k_late), extra=values + states, work=3 * values / n_chunks, back_work=padded,
    )  # fmt: skip
    book.hold(q_in, k_in, v, v_beta, k_beta, apart, system, attended, k_fallen, new, known, strength, fall)
    return book.op(run.n_tokens * n_heads * dim_v * e, scanned)
