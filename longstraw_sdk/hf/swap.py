"""Replacing the class of modules in place, reversibly: parameters, hooks and children stay what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def swap_classes(swaps: Iterable[tuple[Any, type, dict[str, Any]]]) -> Callable[[], None]:
    """Give each module a class and attributes; returns the function that takes both back."""
    swapped = []
    for module, new_class, attributes in list(swaps):
        swapped.append((module, type(module), attributes))
        module.__class__ = new_class
        for name, value in attributes.items():
            setattr(module, name, value)

    def restore() -> None:
        for module, stock, attributes in swapped:
            module.__class__ = stock
            for name in attributes:
                delattr(module, name)

    return restore
