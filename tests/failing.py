"""Memory that runs out: hooks on one layer stand for the allocator and raise what PyTorch raises."""

import contextlib

import torch

from longstraw_sdk.lora import base_model_of

SAID = "CUDA out of memory. Tried to allocate 2.00 GiB."


def layers_of(model):
    return base_model_of(model).base_model.layers


@contextlib.contextmanager
def memory_for(model, n_tokens):
    """A forward of more than `n_tokens` fails in its last layer."""

    def allocate(layer, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.shape[:2].numel() > n_tokens:
            raise torch.OutOfMemoryError(SAID)

    with layers_of(model)[-1].register_forward_pre_hook(allocate, with_kwargs=True):
        yield


@contextlib.contextmanager
def no_memory_in_backward(model, after=0):
    """The backward of the first layer fails, behind `after` others: those of the layers above it have run by then."""
    left = after

    def fail(gradient):
        nonlocal left
        left -= 1
        if left < 0:
            raise torch.OutOfMemoryError(SAID)

    def watch(layer, args, out):
        hidden = out[0] if isinstance(out, tuple) else out
        if hidden.requires_grad:
            hidden.register_hook(fail)

    with layers_of(model)[0].register_forward_hook(watch):
        yield
