"""The witness: a write into resident state is found before a gradient of it is added."""

import re

import pytest
import torch

from longstraw_sdk import LongStrawSession, WitnessError
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.state import AttentionKVSpec, PagePool, RecurrentSpec, ResidentState, Witness

SPECS = (
    RecurrentSpec(layer=0, n_heads=2, key_dim=3, value_dim=5, conv_channels=7, conv_tail=3, dtype=torch.float32),
    AttentionKVSpec(layer=1, n_kv_heads=2, key_dim=4, value_dim=6, dtype=torch.float32),
)
CPU = torch.device("cpu")


def append(state, n_tokens):
    produced = {
        (0, "recurrent"): {"recurrent": torch.randn(1, 2, 3, 5), "conv": torch.randn(1, 7, 3)},
        (1, "kv"): {"k": torch.randn(1, 2, n_tokens, 4), "v": torch.randn(1, 2, n_tokens, 6)},
    }
    state.append_chunk(n_tokens, produced, keep_boundaries=True)


@pytest.fixture
def state():
    """Ten tokens on pages of four: two full pages and a half one; boundaries 1 and 2."""
    state = ResidentState(SPECS, torch.arange(10), PagePool(4), "prompt", CPU)
    append(state, 6)
    append(state, 4)
    return state


def kv_page(state, index):
    return state.paged[1, "kv"].pages[index]


def boundary(state, number):
    return state.recurrent[0, "recurrent"].boundaries[number]


def write_page(state):
    kv_page(state, 1).tensor("v")[0, 2, 3] += 1


def write_through_a_slice(state):
    kv_page(state, 2).tensor("k")[:, :1].zero_()


def write_boundary(state):
    boundary(state, 1)["recurrent"].mul_(2)


def write_convolution(state):
    boundary(state, 2)["conv"][0, 0, 0] = 0


def swap_page_tensor(state):
    page = kv_page(state, 0)
    page._tensors["k"] = page._tensors["k"].clone()


def swap_storage(state):
    tensor = kv_page(state, 1).tensor("k")
    tensor.data = tensor.data.clone()


def swap_pages(state):
    pages = state.paged[1, "kv"].pages
    pages[0], pages[1] = pages[1], pages[0]


def swap_boundary_tensor(state):
    boundary(state, 2)["recurrent"] = boundary(state, 2)["recurrent"].clone()


def append_row(state):
    state.paged[1, "kv"].append({"k": torch.zeros(1, 2, 1, 4), "v": torch.zeros(1, 2, 1, 6)})


def append_rows_on_a_new_page(state):
    state.paged[1, "kv"].append({"k": torch.zeros(1, 2, 3, 4), "v": torch.zeros(1, 2, 3, 6)})


def drop_page(state):
    state.paged[1, "kv"].pages.pop()


def drop_boundary(state):
    del state.recurrent[0, "recurrent"].boundaries[1]


VIOLATIONS = [
    (write_page, "layer 1, kv, page 1 (allocation 1), component 'v'"),
    (write_through_a_slice, "layer 1, kv, page 2 (allocation 2), component 'k'"),
    (write_boundary, "layer 0, recurrent, boundary 1, component 'recurrent'"),
    (write_convolution, "layer 0, recurrent, boundary 2, component 'conv'"),
    (swap_page_tensor, "layer 1, kv, page 0 (allocation 0), component 'k'"),
    (swap_storage, "layer 1, kv, page 1 (allocation 1), component 'k'"),
    (swap_pages, "layer 1, kv, page 0"),
    (swap_boundary_tensor, "layer 0, recurrent, boundary 2, component 'recurrent'"),
    (append_row, "layer 1, kv, page 0"),
    (append_rows_on_a_new_page, "layer 1, kv, page"),
    (drop_page, "layer 1, kv, page 2"),
    (drop_boundary, "layer 0, recurrent, boundary 1"),
]


@pytest.mark.parametrize("with_digest", [False, True])
@pytest.mark.parametrize(("violate", "place"), VIOLATIONS, ids=lambda x: getattr(x, "__name__", ""))
def test_violation_is_caught_and_its_layer_and_page_named(state, violate, place, with_digest):
    witness = Witness.of(state, with_digest=with_digest)
    witness.verify(state)
    violate(state)
    with pytest.raises(WitnessError, match=re.escape(place)):
        witness.verify(state)


@pytest.mark.parametrize("with_digest", [False, True])
def test_reading_the_state_and_collecting_gradients_are_no_violations(state, with_digest):
    witness = Witness.of(state, with_digest=with_digest)
    for block in state.paged[1, "kv"].blocks(10, with_grads=True):
        block.grads["k"].add_(block.values["k"].sum())
    sum(leaf.sum() for leaf in state.recurrent[0, "recurrent"].leaves(2).values()).backward()
    assert state.has_gradient
    witness.verify(state)
    state.drop_accumulators()
    witness.verify(state)


def write_page_through_numpy(state):
    kv_page(state, 1).tensor("k").numpy()[0, 1, 2] += 1


def write_boundary_through_data(state):
    boundary(state, 2)["recurrent"].data[0, 0, 0, 0] += 1


@pytest.mark.parametrize(
    ("write", "place"),
    [(write_page_through_numpy, "kv, page 1 "), (write_boundary_through_data, "recurrent, boundary 2,")],
    ids=["numpy", ".data"],
)
def test_a_write_through_a_raw_pointer_is_found_by_the_digest_alone(state, write, place):
    structural, with_content = Witness.of(state), Witness.of(state, with_digest=True)
    write(state)
    structural.verify(state)
    with pytest.raises(WitnessError, match=f"{place}.*digest"):
        with_content.verify(state)


# --- in a session ---

PROMPT = torch.arange(3, 20)
ROW = torch.tensor([5, 9, 2, 40])


@pytest.fixture
def model():
    return tiny_model("qwen36", n_layers=2, layer_types=["linear_attention", "full_attention"])


def open_session(model, **options):
    return LongStrawSession(model, chunk_tokens=8, page_tokens=4, **options)


def has_gradient(model):
    return any(p.grad is not None for p in model.parameters())


def session_page(prefix):
    return prefix._state.paged[1, "kv"].pages[1].tensor("k")


def session_boundary(prefix):
    return prefix._state.recurrent[0, "recurrent"].boundaries[2]["recurrent"]


TARGETS = [(session_page, "layer 1, kv, page 1"), (session_boundary, "layer 0, recurrent, boundary 2")]


@pytest.mark.parametrize(("target", "place"), TARGETS, ids=["page", "boundary"])
def test_violation_before_replay_stops_it_before_any_gradient(model, target, place):
    with open_session(model) as session, session.capture(PROMPT) as prefix:
        target(prefix).add_(1)
        for call in (
            lambda: prefix.replay(ROW),
            lambda: prefix.score([ROW]),
            lambda: prefix.sample(1, max_new_tokens=1),
        ):
            with pytest.raises(WitnessError, match=place):
                call()
        assert not has_gradient(model)
        prefix.refresh()
        prefix.replay(ROW).logps.sum().backward()
        assert has_gradient(model), "control: an unharmed step does add gradients"


@pytest.mark.parametrize("field", ["logps", "entropy"])
@pytest.mark.parametrize(("target", "place"), TARGETS, ids=["page", "boundary"])
def test_violation_between_replay_and_backward_stops_backward_before_any_gradient(model, target, place, field):
    with open_session(model) as session:
        with session.capture(PROMPT) as prefix:
            loss = getattr(prefix.replay(ROW), field).sum()
            target(prefix).add_(1)
            with pytest.raises(WitnessError, match=place):
                loss.backward()
            assert not has_gradient(model)
            assert not prefix.needs_sweep
        assert session.pool.audit() == []


def test_violation_between_backward_and_sweep_stops_the_sweep(model):
    with open_session(model) as session, session.capture(PROMPT) as prefix:
        prefix.replay(ROW).logps.sum().backward()
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        session_page(prefix).add_(1)
        with pytest.raises(WitnessError, match="layer 1, kv, page 1"):
            prefix.sweep()
        with pytest.raises(WitnessError, match="layer 1, kv, page 1"):
            session.finalize()
        after = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        prefix.release()


def test_a_forward_that_writes_into_its_view_is_caught_in_the_replay_that_did_it(model):
    with open_session(model) as session, session.capture(PROMPT) as prefix:

        def write(*_):
            session_page(prefix).mul_(1)

        hook = session.bound.base.model.register_forward_hook(write)
        with pytest.raises(WitnessError, match=r"layer 1, kv, page 1.*version"):
            prefix.replay(ROW)
        hook.remove()
        prefix.release()


def test_verify_content_finds_a_raw_write_that_the_default_does_not(model):
    for verify_content in (False, True):
        with open_session(model, verify_content=verify_content) as session, session.capture(PROMPT) as prefix:
            session_page(prefix).numpy()[...] += 1
            if verify_content:
                with pytest.raises(WitnessError, match=r"layer 1, kv, page 1.*digest"):
                    prefix.replay(ROW)
            else:
                prefix.replay(ROW)
