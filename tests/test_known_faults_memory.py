"""Faults of memory that others met (docs/known-faults.md): live tensors are counted, as in tests/test_memory.py."""

import pytest
import rank_trainers
import torch

from longstraw_sdk import LongStrawSession
from longstraw_sdk.evidence.memory import trace_memory
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.lora import base_model_of
from longstraw_sdk.ops import attention_reference
from longstraw_sdk.replay import pack_rows


def tokens(n, seed=0):
    return torch.randint(2, 97, (n,), generator=torch.Generator().manual_seed(seed))


def peak_of(model, prompt, rows, **options):
    """Peak of live bytes while one group is captured, replayed in packs and closed."""
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p)
    options = {"chunk_tokens": 64, "page_tokens": 64, "probe": False, **options}
    with LongStrawSession(model, **options) as session, trace_memory() as trace:
        with session.capture(prompt) as prefix:
            for pack in packs(rows, options.get("replay_tokens")):
                torch.cat([out.logps for out in prefix.replay_packed(pack)]).sum().backward()
        session.finalize()
    return trace.peak_bytes


def packs(rows, replay_tokens):
    return [[rows[i] for i in pack] for pack in pack_rows([len(row) for row in rows], replay_tokens)]


def test_twenty_steps_peak_where_the_third_did():
    """Row 3. The first two make gradients and moments; the control keeps a graph per step."""
    model = tiny_model("llama", n_layers=1)
    peaks, ends, leaks = [], [], []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with LongStrawSession(model, chunk_tokens=32, page_tokens=16, probe=False) as session, trace_memory() as trace:
        for step in range(24):
            trace.peak_bytes = trace.live_bytes
            with session.capture(tokens(70, step)) as prefix:
                for i in range(2):
                    out = prefix.replay(tokens(8, 100 * step + i))
                    out.logps.sum().backward()
                    if step >= 20:
                        leaks.append(out)
                    del out
            session.finalize()
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(trace.peak_bytes)
            ends.append(trace.live_bytes)
    assert len(set(peaks[2:20])) == 1, peaks
    assert len(set(ends[2:20])) == 1, ends
    assert ends[23] > ends[20] > ends[19], "control: outputs that are kept are seen"


@pytest.mark.xdist_group("ranks")
def test_two_ranks_need_no_more_each_than_one_alone(rank_pools):
    """Row 3. With prompts of their own as much as one process (the reduction comes when pages are gone), with one that
    they share far less.
    """
    alone = rank_trainers.peak_of_a_group(1)
    beside, shared = (max(rank_pools[2].run(rank_trainers.peak_of_a_group, size)) for size in (1, 2))
    assert beside <= 1.01 * alone, (beside, alone)
    assert shared <= 0.75 * alone, (shared, alone)


def test_the_head_runs_on_response_tokens_alone():
    """Row 4. A prompt of 1,000 tokens and 10 of response: ten rows of logits; a stock forward makes 1,010."""
    model = tiny_model("llama", n_layers=1, max_position_embeddings=2048)
    prompt, row = tokens(1000), tokens(10, 1)
    seen = []
    hook = base_model_of(model).lm_head.register_forward_hook(lambda m, args, out: seen.append(out.shape[-2]))
    with LongStrawSession(model, chunk_tokens=256, page_tokens=64, probe=False) as session:
        with session.capture(prompt) as prefix:
            assert seen == [], "the capture makes no logits"
            prefix.score([row])
            assert seen == [10]
            prefix.replay(row).logps.sum().backward()
            assert seen == [10, 10, 10], "backward makes those of a tile again"
        session.finalize()
    assert seen == [10, 10, 10], "nor does the sweep"
    model(input_ids=torch.cat([prompt, row])[None], use_cache=False)
    hook.remove()
    assert seen[-1] == 1010, "control"


def test_a_response_four_times_longer_costs_what_its_pack_may_hold():
    """Row 5. A group with one outlier peaks no higher than a group in which every response is as long as may be,
    which is what the planner counts.
    """
    model = tiny_model("llama", n_layers=2)
    prompt, outlier = tokens(40), [*(tokens(16, i) for i in range(7)), tokens(64, 9)]
    options = {"replay_tokens": 128, "gradient_scope": "response"}
    worst = peak_of(model, prompt, [tokens(64, i) for i in range(8)], **options)
    found = peak_of(model, prompt, outlier, **options)
    assert found <= 1.01 * worst, (found, worst)
    unbounded = peak_of(model, prompt, outlier, replay_tokens=512, gradient_scope="response")
    assert unbounded > 2 * worst, "control: all in one pack, as wide as the longest"


def test_a_long_response_costs_memory_in_proportion(monkeypatch):
    """Row 7. A response is replayed in one piece, so its length counts, but scores are made tile by tile.

    The bound of a tile is lowered, since at these lengths all pairs would fit in one.
    """
    monkeypatch.setattr(attention_reference, "MAX_TILE_ELEMENTS", 2**14)
    model = tiny_model("llama", n_layers=2, max_position_embeddings=4096)
    prompt, lengths = tokens(40), (256, 1024)
    options = {"replay_tokens": None, "gradient_scope": "response"}
    short, long = (peak_of(model, prompt, [tokens(n)], **options) for n in lengths)
    assert long <= 4.1 * short, (short, long)
    base_model_of(model).set_attn_implementation("eager")
    held = []
    for n in lengths:
        with trace_memory() as trace:
            model(input_ids=tokens(n)[None], use_cache=False).logits.sum().backward()
        held.append(trace.peak_bytes)
        model.zero_grad()
    assert held[1] > 8 * held[0], "control: scores of all pairs grow with the square"


def test_a_recurrent_layer_is_captured_in_memory_that_does_not_grow():
    """Row 56. Response scope keeps the last state alone; what grows is the pages of the one attention layer."""
    model = tiny_model("qwen36", n_layers=4, max_position_embeddings=8192)
    peaks, pages = [], []
    for n in (641, 2561):
        with (
            LongStrawSession(model, chunk_tokens=64, page_tokens=64, probe=False, gradient_scope="response") as session,
            trace_memory() as trace,
            session.capture(tokens(n)),
        ):
            pages.append(session.pool.live_bytes)
        peaks.append(trace.peak_bytes)
    assert pages[1] > 3 * pages[0]
    assert peaks[1] - peaks[0] <= 1.1 * (pages[1] - pages[0]), (peaks, pages)
    held = []
    for n in (641, 2561):
        with trace_memory() as trace:
            model(input_ids=tokens(n)[None], use_cache=False)
        held.append(trace.live_bytes if trace.live_bytes else trace.peak_bytes)
    assert held[1] - held[0] > 10 * (pages[1] - pages[0]), "control: a stock forward grows with the prompt"


@pytest.mark.parametrize("n_rows", [1, 5])
def test_a_group_forwards_its_prompt_once(n_rows):
    """Row 11. Tokens that reach the embedding: P - 1 in the capture, R per response, and none besides."""
    model = tiny_model("llama", n_layers=1)
    seen = []
    embedding = base_model_of(model).get_input_embeddings()
    hook = embedding.register_forward_hook(lambda m, args, out: seen.append(args[0].numel()))
    with LongStrawSession(model, chunk_tokens=64, page_tokens=64, gradient_scope="response", probe=False) as session:
        with session.capture(tokens(200)) as prefix:
            for i in range(n_rows):
                prefix.replay(tokens(8, i)).logps.sum().backward()
        session.finalize()
    hook.remove()
    assert sum(seen) == 199 + 8 * n_rows
