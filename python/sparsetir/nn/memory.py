"""What is derived from the tensors of a graph, kept in the bounded cache of the operators."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

from sparsetir.ops.cache import memory_key
from sparsetir.ops.structure import conversions

__all__ = ["remembered"]

T = TypeVar("T")
# About as many times the bytes of what it is derived from.
GROWTH = 4


def remembered(tensors: tuple[Tensor, ...], key: Hashable, make: Callable[[], T]) -> T:
    """`make()`, or what it gave before for the same tensors, unless they were written to since.

    key : tells uses apart. While calls are traced (torch.compile) nothing is remembered.
    """
    if torch.compiler.is_compiling():
        return make()
    full = (__name__, key, *map(memory_key, tensors))
    found = conversions.get(full)
    if found is None:
        made = make()
        nbytes = GROWTH * sum(x.nbytes for x in tensors)
        found = conversions.put(full, made, nbytes, tensors)
    return found
