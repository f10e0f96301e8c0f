"""Sparse products as torch operators, `torch.ops.sparsetir.*`, each with its gradients.

In all of them `rowptr` and `col` are a pattern as `sparsetir.ops.structure.structure_of` takes it,
and values of elements come and go in the order of `col`. Heads are a first dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparsetir.ops.checks import check_dense, check_values
from sparsetir.ops.messages_library import (
    as_messages,
    gradients_of_product,
    gspmm_arg,
    heads_first,
    mean_gradient,
)
from sparsetir.ops.registry import Gradients, Operation, Operator
from sparsetir.ops.structure import Structure, pattern_of_edges, structure_of


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
