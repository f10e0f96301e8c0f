"""What is derived from the tensors of a graph, kept in the bounded cache of the operators."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

from sparsetir.ops.cache import kept, private, same
from sparsetir.ops.registry import is_transformed

T = TypeVar("T")


def remembered(
    tensors: tuple[Tensor, ...],
    key: Hashable,
    make: Callable[[], T],
    compared: tuple[Tensor, ...] = (),
) -> T:
    """`make()`, or what it gave before for the same tensors with the same contents.

    key : tells uses apart
    compared : what `make` uses besides. Results for the numbers that it had last are remembered,
        whatever tensors have them

    While calls are traced (torch.compile) or transformed (torch.func) nothing is remembered.
    """
    if torch.compiler.is_compiling() or is_transformed():
        return make()
    full = (__name__, key, *((x.dtype, x.device, x.shape) for x in compared))
    found = kept.find(full, *tensors)
    if found is not None:
        made, copies = found
        if all(map(same, compared, copies)):
            return made
    copies = [private(x) for x in compared]
    return kept.remember(full, lambda: (make(), copies), *tensors)[0]
