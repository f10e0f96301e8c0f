"""What is derived from the tensors of a graph, kept in the bounded cache of the operators."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

from sparsetir.ops.cache import kept, lasting, memory_key
from sparsetir.ops.registry import is_transformed

__all__ = ["remembered"]

T = TypeVar("T")


def remembered(
    tensors: tuple[Tensor, ...],
    key: Hashable,
    make: Callable[[], T],
    compared: tuple[Tensor, ...] = (),
) -> T:
    """`make()`, or what it gave before for the same tensors, unless they were written to since.

    key : tells uses apart
    compared : what `make` uses besides; may be written to unseen, as by NumPy. Results for the
        numbers that it had last are remembered

    While calls are traced (torch.compile) or transformed (torch.func) nothing is remembered.
    """
    if torch.compiler.is_compiling() or is_transformed():
        return make()
    full = (__name__, key, *map(memory_key, tensors), *((x.dtype, x.device) for x in compared))
    found = kept.get(full)
    if found is not None:
        made, copies = found
        if all(map(torch.equal, compared, copies)):
            return made
        kept.drop(full)
    copies = lasting(lambda: [x.clone() for x in compared])()
    made = lasting(make)()
    kept.put(full, (made, copies), *tensors)
    return made
