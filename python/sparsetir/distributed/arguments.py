"""Checks of operators' arguments on a graph, made on all processes together."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from sparsetir.distributed.collectives import check_on_all
from sparsetir.ops.tensors import check_tensor
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.refusals import wrong

if TYPE_CHECKING:
    from sparsetir.distributed.graph import DistGraph


P = ParamSpec("P")
T = TypeVar("T")
# Number of first calls on a graph that are compared among processes, so that an invalid argument on
# one of them is an error on all. Later calls are only compared if they are unlike all of these.
COMPARED_CALLS = 16


def untraced(call: Callable[P, T]) -> Callable[P, T]:
    """Exclude a function from torch.compile, which calls it between the graphs that it makes."""
    apart = _disable_dynamo(call)  # imports its dependencies when called

    @wraps(call)
    def either(*args: P.args, **options: P.kwargs) -> T:
        return (apart if torch.compiler.is_compiling() else call)(*args, **options)

    return either


def compared(graph: DistGraph, caller: str, check: Callable[[], object]) -> None:
    """Check arguments; those of the first calls, and new ones, on all processes together."""
    if graph.compared < COMPARED_CALLS:
        graph.compared += 1
        graph.seen.add(check_on_all(graph.group, caller, lambda: (caller, check())))
        return
    facts = caller, check()
    if facts not in graph.seen:
        check_on_all(graph.group, caller, lambda: facts)
        graph.seen.add(facts)


def likeness(x: Tensor | None, rows: int = -2) -> tuple[object, ...]:
    """The dtype and shape that tensors of all processes share; rows : the dimension left out."""
    if x is None:
        return (None,)
    shape = list(x.shape)
    shape[rows] = -1
    return dtype_name(x), tuple(shape)


def check_rows(
    caller: str, name: str, x: Any, rows: int, dims: tuple[int, ...], like: Tensor | None = None
) -> None:
    """Raise unless x has a row for each own node; dims : the numbers of dimensions it may have.

    x : (rows, feat) or (heads, rows, feat), which callers pass as (rows, heads, feat)
    """
    check_tensor(caller, name, x, like)
    if x.dim() not in dims or x.shape[-2] != rows:
        expected = f"shape ({rows}, feat) or ({rows}, heads, feat), a row for each own node"
        raise wrong(caller, name, expected, shown(x))


def shown(x: Tensor) -> tuple[int, ...]:
    """The shape of an operand with heads first, in the form that callers pass."""
    return tuple(x.shape if x.dim() < 3 else x.transpose(0, 1).shape)


def check_values(caller: str, values: Any, x: Tensor, nnz: int) -> None:
    """Raise unless values are (nnz,) or (heads, nnz), and fit x; callers have heads last."""
    check_tensor(caller, "values", values, x)
    fits = values.dim() in (1, 2) and values.shape[-1] == nnz
    if fits and values.dim() == 2:  # one head needs x with heads: (nnz, 1) may be weights of PyG
        fits = len(values) == len(x) if x.dim() == 3 else len(values) > 1
    if not fits:
        expected = f"shape ({nnz},) or ({nnz}, heads), a number for each own edge"
        raise wrong(caller, "values", expected, tuple(values.shape[::-1]))


def cast(*tensors: Any) -> tuple[Any, ...]:
    """Convert to autocast's dtype, if autocast is on."""
    device = next(x for x in tensors if x is not None).device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x is not None and x.dtype.itemsize < 8 else x for x in tensors)
