"""Sparse products as torch operators, `torch.ops.sparsetir.*`, each with its gradients.

In all of them `rowptr` and `col` are a pattern as `sparsetir.ops.structure.structure_of` takes it,
and values of elements come and go in the order of `col`. Heads are a first dimension.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sparsetir.ops.cache import memory_key
from sparsetir.ops.messages_library import (
    as_messages,
    gradients_of_product,
    gspmm_arg,
    heads_first,
    mean_gradient,
)
from sparsetir.ops.registry import PLAIN, Context, Gradients, Operation, Operator, is_undisturbed
from sparsetir.ops.structure import Structure, known_edges, pattern_of_edges, structure_of
from sparsetir.ops.tensors import (
    INDEX_DTYPES,
    check_dense,
    check_edges,
    check_values,
    launch,
    may_be_recorded,
    target_of,
)
from sparsetir.planning.run_plan import compiled_by
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.kernel import Kernel
from sparsetir.schedules.default import l2_bytes, l3_bytes
from sparsetir.schedules.operators.edge_sums import EdgeSums
from sparsetir.schedules.templates.edge_sums import SumLoops


@dataclass
class RowPointers(Operation[Tensor]):
    """Row pointers of edges, which are checked."""

    edges: Tensor
    m: int
    n: int
    autocast = False

    def run(self) -> Tensor:
        return pattern_of_edges(self.edges, self.m, self.n).rowptr.clone()

    def fake(self) -> Tensor:
        return self.edges.new_empty(self.m + 1)


row_pointers = Operator("row_pointers", RowPointers)


def _product(
    who: str, structure: Structure, name: str, b: Tensor, values: Tensor | None, reduce: str = "sum"
) -> Tensor:
    """The product with a matrix, checked where none like it was made before."""
    found = structure.again("spmm", (b,), values, reduce)
    if found is not None:
        return found
    check_dense(who, name, b, structure, structure.n)
    if values is not None:
        check_values(who, values, b, structure)
    return structure.run("spmm", (b,), values, reduce)


@dataclass
class Spmm(Operation[Tensor]):
    """C[i, k] = reduce over the elements (i, j) of A[i, j] * B[j, k]."""

    rowptr: Tensor
    col: Tensor
    values: Tensor | None
    b: Tensor
    reduce: str

    def run(self) -> Tensor:
        structure = structure_of(self.rowptr, self.col, self.b.shape[-2], "spmm")
        return _product("spmm", structure, "b", self.b, self.values, self.reduce)

    def fake(self) -> Tensor:
        b = self.b
        return b.new_empty((*b.shape[:-2], self.rowptr.shape[0] - 1, b.shape[-1]))

    def gradients(self, grad: Tensor) -> Gradients:
        rowptr, col, values, b, reduce = self.rowptr, self.col, self.values, self.b, self.reduce
        if reduce in ("max", "min"):
            u, e, op = as_messages(values, b)
            _, place = gspmm_arg(rowptr, col, u, e, b.shape[-2], op, reduce)
            return gradients_of_product(col, values, b, heads_first(place, b), grad)
        if reduce == "mean":
            grad = mean_gradient(grad, (rowptr[1:] - rowptr[:-1])[:, None])
        return {
            "values": lambda: sddmm(rowptr, col, grad, b),
            "b": lambda: spmm_transposed(rowptr, col, values, grad, b.shape[-2]),
        }


spmm = Operator("spmm", Spmm)


@dataclass
class SpmmTransposed(Operation[Tensor]):
    """B = A^T C."""

    rowptr: Tensor
    col: Tensor
    values: Tensor | None
    c: Tensor
    n: int

    def run(self) -> Tensor:
        structure = structure_of(self.rowptr, self.col, self.n).transposed
        return _product("spmm_transposed", structure, "c", self.c, self.values)

    def fake(self) -> Tensor:
        return self.c.new_empty((*self.c.shape[:-2], self.n, self.c.shape[-1]))

    def gradients(self, grad: Tensor) -> Gradients:
        rowptr, col, values, c = self.rowptr, self.col, self.values, self.c
        return {
            "values": lambda: sddmm(rowptr, col, c, grad),
            "c": lambda: spmm(rowptr, col, values, grad, "sum"),
        }


spmm_transposed = Operator("spmm_transposed", SpmmTransposed)


@dataclass
class Sddmm(Operation[Tensor]):
    """OUT[e] = X[i] . Y[j] for each element e = (i, j) of A."""

    rowptr: Tensor
    col: Tensor
    x: Tensor
    y: Tensor

    def run(self) -> Tensor:
        structure = structure_of(self.rowptr, self.col, self.y.shape[-2], "sddmm")
        found = structure.again("sddmm", (self.x, self.y))
        if found is not None:
            return found
        check_dense("sddmm", "x", self.x, structure, structure.m)
        check_dense("sddmm", "y", self.y, structure, structure.n, like=self.x)
        return structure.run("sddmm", (self.x, self.y))

    def fake(self) -> Tensor:
        return self.x.new_empty((*self.x.shape[:-2], self.col.shape[-1]))

    def gradients(self, grad: Tensor) -> Gradients:
        rowptr, col, x, y = self.rowptr, self.col, self.x, self.y
        return {
            "x": lambda: spmm(rowptr, col, grad, y, "sum"),
            "y": lambda: spmm_transposed(rowptr, col, grad, x, y.shape[-2]),
        }


sddmm = Operator("sddmm", Sddmm)


# -- sums over edges that are new ------------------------------------------------------------------
#
# As those of mini-batches are in each step. To sort edges, and to keep what is made of them, takes
# as long as some sums over them take without. So the first products with a tensor of edges go
# through them as they come, until what that took more is what sorting would have taken.

SUMMED = (torch.float32, torch.float64)
CPU = torch.device("cpu")
MOST = 1 << 20  # edges; where there are more, all threads are worth sorting for
# Patterns that a process sorts all the same, until a kernel that does not is worth compiling.
SORTED = 16
# What sorting takes, and what a sum without it takes more, forward and backward: nanoseconds, those
# of an edge, and those of each of its features while B and C are in the L2 cache. (Zen 3.)
SORT, SORT_EDGE, FEATURE = 500_000, 25, 0.2
MOST_SUMS = 8  # with the same edges
MOST_MET = 256


class _Met:
    """Edges that were met, by their memory, and how often; at their version."""

    __slots__ = ("count", "storage", "version")

    def __init__(self, storage: Callable[[], object], version: int) -> None:
        self.storage, self.version, self.count = storage, version, 0


_met: dict[object, _Met] = {}
_sorted = 0


def sum_of_new(A: Any, B: Any, reduce: str, values: Any) -> Tensor | None:
    """What :func:`sparsetir.ops.spmm` gives, for edges that are not worth sorting.

    None for all else, and where anything might be wrong: the other way then says what it is.
    """
    if reduce not in ("sum", "mean") or type(B) not in PLAIN or B.dim() != 2:
        return None
    edges, size = A if type(A) is tuple and len(A) == 2 else (A, len(B))
    n, m = size if type(size) is tuple and len(size) == 2 else (size, size)
    if type(edges) is not Tensor or edges.layout is not torch.strided or edges.dim() != 2:
        return None
    if edges.is_nested:  # which has no shape
        return None
    (ends, nnz), (rows, feat) = edges.shape, B.shape
    if type(m) is not int or type(n) is not int or m < 1 or n != rows or ends != 2:
        return None
    if not 0 < nnz <= MOST or not feat or not is_undisturbed():
        return None
    if not _is_plain(B, SUMMED) or not _is_plain(edges, INDEX_DTYPES):
        return None
    if values is not None:
        fits = type(values) in PLAIN and values.shape == (nnz,) and not values.requires_grad
        if not fits or not _is_plain(values, (B.dtype,)):
            return None
    if torch.are_deterministic_algorithms_enabled():
        return None
    if not _is_new(edges, m, n, feat * B.itemsize):
        return None
    options = {"dtype": dtype_name(B), "reduce": reduce, "heads": None, "target": target_of(CPU)}
    if may_be_recorded("spmm", (m, n), nnz, feat, **options):
        return None
    check_edges("spmm", edges, m, n, "A")
    if B.requires_grad and torch.is_grad_enabled():
        # The gradient is of what was computed, whoever writes to the edges meanwhile.
        return _Sum.apply(edges.clone(), values, B, m, reduce)
    return _summed(edges, values, B, m, reduce == "mean")[0]


def _is_plain(x: Tensor, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether its memory on the host holds its numbers, of one of the types."""
    return x.is_cpu and x.dtype in dtypes and not x.is_neg() and not x._is_zerotensor()


def _is_new(edges: Tensor, m: int, n: int, row: int) -> bool:
    """Whether edges have been met so seldom that sorting them would have taken longer.

    row : bytes of a row of B
    """
    global _sorted
    key = memory_key(edges)
    found = _met.get(key)
    version = -1 if edges.is_inference() else edges._version
    if found is None or found.storage() is None or found.version != version:
        if known_edges(edges, m, n) is not None:
            return False
        if _sorted < SORTED:
            _sorted += 1
            return False
        if len(_met) >= MOST_MET:
            _met.clear()
        forget = lambda _: _met.pop(key, None)  # noqa: E731
        found = _met[key] = _Met(weakref.ref(edges.untyped_storage(), forget), version)
    found.count += 1
    nnz, both = edges.shape[1], (m + n) * row
    more = FEATURE / 4 * row * (1 + (both > l2_bytes()) + 2 * (both > l3_bytes()))
    return found.count <= min(MOST_SUMS, (SORT + SORT_EDGE * nnz) / (more * nnz))


def _summed(
    edges: Tensor, values: Tensor | None, b: Tensor, m: int, mean: bool, back: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The sums at targets, (m, feat), and how many edges each has; back : at sources."""
    sources, targets = edges.unbind()
    if back:
        sources, targets = targets, sources
    out, count = b.new_empty(m, b.shape[1]), b.new_empty(m) if mean else None
    kernel = _kernel(dtype_name(b), dtype_name(edges), values is not None, mean, b.shape[1])
    arrays = {"source": sources, "target": targets, "b": b, "c": out, "count": count, "w": values}
    launch(kernel, {**arrays, "m": m, "n": len(b), "nnz": edges.shape[1], "feat": b.shape[1]})
    return out, count


@lru_cache(256)
def _kernel(dtype: str, idtype: str, weighted: bool, mean: bool, feat: int) -> Kernel:
    problem = EdgeSums(dtype, idtype, weighted, mean)
    return compiled_by(SumLoops(feat), problem, target_of(CPU))


class _Sum(torch.autograd.Function):
    """The sums, and their gradient with respect to B."""

    @staticmethod
    def forward(
        ctx: Context, edges: Tensor, values: Tensor | None, b: Tensor, m: int, reduce: str
    ) -> Tensor:
        out, count = _summed(edges, values, b, m, reduce == "mean")
        ctx.save_for_backward(edges, values, count)
        ctx.others = (len(b),)
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> object:
        (grad,), (edges, values, count) = grads, ctx.saved_tensors
        m, (n,) = len(grad), ctx.others
        if count is not None:
            grad = mean_gradient(grad, count[:, None])
        if torch.is_grad_enabled() or not is_undisturbed():
            rowptr = row_pointers(edges, m, n)
            of_b = spmm_transposed(rowptr, edges, values, grad, n)
        else:
            of_b, _ = _summed(edges, values, grad, n, False, back=True)
        return None, None, of_b, None, None
