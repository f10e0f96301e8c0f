"""Sparse products as torch operators, `torch.ops.sparsetir.*`, each with its gradients.

In all of them `rowptr` and `col` are a pattern as `sparsetir.ops.structure.structure_of` takes it,
and values of elements come and go in the order of `col`. Heads are a first dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetir.ops.checks import check_dense, check_values
from sparsetir.ops.extremum import extremum_and_place, gradients
from sparsetir.ops.registry import define, save, save_inputs, saved
from sparsetir.ops.structure import pattern_of_edges, structure_of


def _count(col: Tensor) -> Any:
    """Elements of a pattern."""
    return col.shape[-1]


# -- row pointers of edges ------------------------------------------------------------------------


def _row_pointers(edges: Tensor, m: int, n: int) -> Tensor:
    return pattern_of_edges(edges, m, n).rowptr.clone()


row_pointers = define(
    "row_pointers(Tensor edges, SymInt m, SymInt n) -> Tensor",
    _row_pointers,
    lambda edges, m, n: edges.new_empty(m + 1),
    autocast=False,
)


# -- C = A B --------------------------------------------------------------------------------------


def spmm_kernel(
    rowptr: Tensor, col: Tensor, values: Tensor | None, b: Tensor, reduce: str
) -> Tensor:
    """C[i, k] = reduce over the elements (i, j) of A[i, j] * B[j, k], without gradients."""
    structure = structure_of(rowptr, col, b.shape[-2], "spmm")
    found = structure.again("spmm", (b,), values, reduce)
    if found is not None:
        return found
    check_dense("spmm", "b", b, structure, structure.n)
    if values is not None:
        check_values("spmm", values, b, structure)
    return structure.run("spmm", (b,), values, reduce)


def _spmm_fake(
    rowptr: Tensor, col: Tensor, values: Tensor | None, b: Tensor, reduce: str
) -> Tensor:
    return b.new_empty((*b.shape[:-2], rowptr.shape[0] - 1, b.shape[-1]))


def mean_gradient(grad: Tensor, elements: Tensor) -> Tensor:
    """The gradient with respect to sums of rows, of that with respect to their means.

    elements : of each row, broadcast with `grad`
    """
    # In float32 at least: 16 bits end at 65504, and rows may have more elements.
    wide = torch.promote_types(grad.dtype, torch.float32)
    return (grad / elements.clamp(min=1).to(wide)).to(grad.dtype)


def _spmm_backward(ctx: Any, grad: Tensor) -> Any:
    rowptr, col, values, b, reduce = saved(ctx)
    _, _, for_values, for_b, _ = ctx.needs_input_grad
    if reduce in ("max", "min"):
        _, arg = spmm_arg(rowptr, col, values, b, reduce == "max")
        return None, None, *gradients(col, values, b, arg, grad, (for_values, for_b)), None
    if reduce == "mean":
        grad = mean_gradient(grad, (rowptr[1:] - rowptr[:-1])[:, None])
    n = b.shape[-2]
    return (
        None,
        None,
        sddmm(rowptr, col, grad, b) if for_values else None,
        spmm_transposed(rowptr, col, values, grad, n) if for_b else None,
        None,
    )


spmm = define(
    "spmm(Tensor rowptr, Tensor col, Tensor? values, Tensor b, str reduce) -> Tensor",
    spmm_kernel, _spmm_fake, _spmm_backward, save_inputs,
)  # fmt: skip


# -- B = A^T C ------------------------------------------------------------------------------------


def _spmm_transposed(
    rowptr: Tensor, col: Tensor, values: Tensor | None, c: Tensor, n: int
) -> Tensor:
    structure = structure_of(rowptr, col, n)
    found = structure.transposed.again("spmm", (c,), values)
    if found is not None:
        return found
    check_dense("spmm_transposed", "c", c, structure, structure.m)
    if values is not None:
        check_values("spmm_transposed", values, c, structure)
    return structure.transposed.run("spmm", (c,), values)


def _spmm_transposed_fake(
    rowptr: Tensor, col: Tensor, values: Tensor | None, c: Tensor, n: int
) -> Tensor:
    return c.new_empty((*c.shape[:-2], n, c.shape[-1]))


def _spmm_transposed_backward(ctx: Any, grad: Tensor) -> Any:
    rowptr, col, values, c, _ = saved(ctx)
    _, _, for_values, for_c, _ = ctx.needs_input_grad
    return (
        None,
        None,
        sddmm(rowptr, col, c, grad) if for_values else None,
        spmm(rowptr, col, values, grad, "sum") if for_c else None,
        None,
    )


spmm_transposed = define(
    "spmm_transposed(Tensor rowptr, Tensor col, Tensor? values, Tensor c, SymInt n) -> Tensor",
    _spmm_transposed, _spmm_transposed_fake, _spmm_transposed_backward, save_inputs,
)  # fmt: skip


# -- OUT = A's pattern of X Y^T -------------------------------------------------------------------


def _sddmm(rowptr: Tensor, col: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """OUT[e] = X[i] . Y[j] for each element e = (i, j), without gradients."""
    structure = structure_of(rowptr, col, y.shape[-2], "sddmm")
    found = structure.again("sddmm", (x, y))
    if found is not None:
        return found
    check_dense("sddmm", "x", x, structure, structure.m)
    check_dense("sddmm", "y", y, structure, structure.n, like=x)
    return structure.run("sddmm", (x, y))


def _sddmm_backward(ctx: Any, grad: Tensor) -> Any:
    rowptr, col, x, y = saved(ctx)
    _, _, for_x, for_y = ctx.needs_input_grad
    return (
        None,
        None,
        spmm(rowptr, col, grad, y, "sum") if for_x else None,
        spmm_transposed(rowptr, col, grad, x, y.shape[-2]) if for_y else None,
    )


sddmm = define(
    "sddmm(Tensor rowptr, Tensor col, Tensor x, Tensor y) -> Tensor",
    _sddmm,
    lambda rowptr, col, x, y: x.new_empty((*x.shape[:-2], _count(col))),
    _sddmm_backward,
    save_inputs,
)


# -- greatest and least, and where they are -------------------------------------------------------


def _spmm_arg(
    rowptr: Tensor, col: Tensor, values: Tensor | None, b: Tensor, largest: bool
) -> tuple[Tensor, Tensor]:
    structure = structure_of(rowptr, col, b.shape[-2], "spmm")
    check_dense("spmm_arg", "b", b, structure, structure.n)
    if values is not None:
        check_values("spmm_arg", values, b, structure)
    return extremum_and_place(structure, values, b, largest)


def _spmm_arg_fake(
    rowptr: Tensor, col: Tensor, values: Tensor | None, b: Tensor, largest: bool
) -> tuple[Tensor, Tensor]:
    shape = (*b.shape[:-2], rowptr.shape[0] - 1, b.shape[-1])
    return b.new_empty(shape), b.new_empty(shape, dtype=torch.int64)


def _spmm_arg_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, col, values, b, _ = inputs
    save(ctx, col, values, b, output[1])


def _spmm_arg_backward(ctx: Any, grad: Tensor, _: Any) -> Any:
    wanted = ctx.needs_input_grad[2:4]
    col, values, b, place = saved(ctx)
    return None, None, *gradients(col, values, b, place, grad, wanted), None


spmm_arg = define(
    "spmm_arg(Tensor rowptr, Tensor col, Tensor? values, Tensor b, bool largest) "
    "-> (Tensor, Tensor)",
    _spmm_arg, _spmm_arg_fake, _spmm_arg_backward, _spmm_arg_save,
)  # fmt: skip
