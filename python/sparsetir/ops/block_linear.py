"""Linear maps with weights in blocks as torch operators, with their gradients.

W (rows, cols) is stored in blocks of r x c: `values` (blocks, c, r) has each by columns, `indptr`
(rows / r + 1,) and `indices` (blocks,) say where rows of blocks have blocks. x is (..., cols).

On a GPU tensor cores multiply blocks of 16-bit types; other products, and gradients of W, are dense
ones there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sparsetir.formats import BSR
from sparsetir.ops.checks import check_tensor
from sparsetir.ops.registry import define, save_inputs, saved
from sparsetir.ops.structure import DTYPES, Structure, structure_of, target_of
from sparsetir.planning.request import compiled_by, default_threads
from sparsetir.runtime.pool import pays
from sparsetir.schedules.default import vector_bits
from sparsetir.schedules.gpu.spmm_tensor_cores import for_format
from sparsetir.schedules.operators.block_linear import BlockLinear, BlockOuter
from sparsetir.schedules.operators.block_spmm import BlockSpmm
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.templates.block_linear import BlockTile


def _wide(x: Tensor) -> Tensor:
    """In the type of the sums; kernels take that alone, as blocks are read more than once."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.resolve_neg().to(wide).contiguous()


def _has_kernels(x: Tensor) -> bool:
    """Whether there are kernels for all types; elsewhere products are dense ones, or by blocks."""
    return x.device.type == "cpu"


def _by_blocks(x: Tensor, indices: Tensor, rows: int, cols: int, tokens: int) -> Any:
    """The config of tensor cores for blocks of a weight, where a GPU has them; else None."""
    if _has_kernels(x) or indices.dtype != torch.int32:
        return None
    return for_format(BSR(rows, cols), Spmm(DTYPES[x.dtype]), tokens, target_of(x.device))


def _product_by_blocks(x: Tensor, w: Tensor, structure: Structure, config: Any) -> Tensor:
    """(tokens, rows) of x (tokens, columns) and w (blocks, columns, rows of a block).

    Kernels have tokens side by side, so that x is transposed before, and the result after.
    """
    (tokens, _), (blocks, cols, rows) = x.shape, w.shape
    problem, target = BlockSpmm(rows, cols, DTYPES[x.dtype]), target_of(x.device)
    kernel = compiled_by(config, problem, target)
    out = x.new_empty(1, structure.m, rows, tokens)
    arrays = {
        "a": w.transpose(1, 2).contiguous(),
        "b": x.t().contiguous().view(1, structure.n, cols, tokens),
        "out": out, "indptr": structure.rowptr, "indices": structure.col,
    }  # fmt: skip
    sizes = {"heads": 1, "mb": structure.m, "nb": structure.n, "blocks": blocks, "feat": tokens}
    structure.call(kernel, arrays, sizes)
    return out.view(-1, tokens).t()


def _flat(x: Tensor) -> Tensor:
    """(tokens, features)."""
    return x.reshape(-1, x.shape[-1])


def _structure(indptr: Tensor, indices: Tensor, columns: int) -> Structure:
    """Where a matrix has blocks; columns : of blocks."""
    return structure_of(indptr, indices, columns, "block_linear")


def _run(structure: Structure, problem: Any, tokens: int, arrays: dict[str, Tensor]) -> None:
    """Run a kernel on arrays that fit."""
    work = structure.nnz * problem.rows * problem.cols * tokens
    parallel = pays(default_threads(), work)
    target = target_of(structure.device)
    config = BlockTile.for_block(problem, vector_bits(target), tokens, parallel)
    kernel = compiled_by(config, problem, target)
    sizes = {"tokens": tokens, "m": structure.m, "n": structure.n, "blocks": structure.nnz}
    given = {**arrays, **sizes, "indptr": structure.rowptr, "indices": structure.col}
    kernel.run_unchecked([given[name] for name in kernel.signature.passed])


def _check(who: str, name: str, x: Tensor, features: int, like: Tensor | None = None) -> None:
    check_tensor(who, name, x, like)
    if x.dim() < 1 or x.shape[-1] != features:
        raise ValueError(
            f"{who}: argument '{name}': expected {features} features, got shape {tuple(x.shape)}"
        )


# -- y = x W^T + b, or x W ------------------------------------------------------------------------


def _linear(
    x: Tensor, values: Tensor, indptr: Tensor, indices: Tensor, bias: Tensor | None,
    rows: int, cols: int, transposed: bool,
) -> Tensor:  # fmt: skip
    out_features, in_features = (cols, rows) if transposed else (rows, cols)
    _check("block_linear", "x", x, in_features, values)
    out = x.new_empty((*x.shape[:-1], out_features))
    if not out.numel():
        return out
    blocks, c, r = values.shape
    structure = _structure(indptr, indices, cols // c)
    tokens = math.prod(x.shape[:-1])
    config = _by_blocks(x, indices, *((c, r) if transposed else (r, c)), tokens)
    wide = values.detach() if blocks and config is not None else _wide(values.detach())
    if transposed:
        structure = structure.transposed
        wide = wide.transpose(1, 2)
        wide = (wide if structure.order is None else wide[structure.order]).contiguous()
        r, c = c, r
    if blocks and config is not None:
        product = _product_by_blocks(_flat(x).detach(), wide, structure, config)
        product = product if bias is None else product + bias.detach().to(x.dtype)
        return product.contiguous().view(out.shape)
    if not blocks or not _has_kernels(x):
        dense = wide.new_zeros(structure.n, structure.m, c, r)
        dense[structure.col.long(), structure.rows.long()] = wide
        dense = dense.transpose(1, 2).reshape(in_features, out_features)
        product = _wide(x) @ dense
        return (product if bias is None else product + bias.to(product.dtype)).to(x.dtype)
    idtype = "int64" if structure.col.dtype == torch.int64 else "int32"
    problem = BlockLinear(r, c, DTYPES[x.dtype], idtype, bias is not None)
    arrays = {"x": _wide(_flat(x)), "w": wide, "y": _flat(out)}
    if bias is not None:
        arrays["bias_"] = _wide(bias)
    _run(structure, problem, tokens, {name: a.detach() for name, a in arrays.items()})
    return out


def _linear_fake(
    x: Tensor, values: Tensor, indptr: Tensor, indices: Tensor, bias: Tensor | None,
    rows: int, cols: int, transposed: bool,
) -> Tensor:  # fmt: skip
    return x.new_empty((*x.shape[:-1], cols if transposed else rows))


def _linear_backward(ctx: Any, grad: Tensor) -> Any:
    x, values, indptr, indices, _, rows, cols, transposed = saved(ctx)
    for_x, for_values, _, _, for_bias, *_ = ctx.needs_input_grad
    pattern = indptr, indices
    for_w = None
    if for_values:
        ends = (grad, x) if transposed else (x, grad)
        for_w = block_outer(*ends, *pattern, values.shape[2], values.shape[1])
    return (
        block_linear(grad, values, *pattern, None, rows, cols, not transposed) if for_x else None,
        for_w, None, None,
        _flat(grad).sum(0) if for_bias else None,
        None, None, None,
    )  # fmt: skip


block_linear = define(
    "block_linear(Tensor x, Tensor values, Tensor indptr, Tensor indices, Tensor? bias, "
    "SymInt rows, SymInt cols, bool transposed) -> Tensor",
    _linear, _linear_fake, _linear_backward, save_inputs,
)  # fmt: skip


# -- the gradient of W where it is stored ---------------------------------------------------------


def _outer(x: Tensor, y: Tensor, indptr: Tensor, indices: Tensor, rows: int, cols: int) -> Tensor:
    """(blocks, cols, rows) sums of y[.., i] * x[.., j]; rows, cols : of a block."""
    check_tensor("block_outer", "y", y, x)
    tokens, wide = math.prod(x.shape[:-1]), _wide(_flat(x))
    if not len(indices) or not tokens:
        return x.new_zeros(len(indices), cols, rows)
    structure = _structure(indptr, indices, x.shape[-1] // cols)
    other = _wide(_flat(y))
    if not _has_kernels(x):
        full = (wide.T @ other).view(structure.n, cols, structure.m, rows).transpose(1, 2)
        return full[structure.col.long(), structure.rows.long()].to(x.dtype)
    idtype = "int64" if structure.col.dtype == torch.int64 else "int32"
    out = wide.new_empty(len(indices), cols, rows)
    problem = BlockOuter(rows, cols, DTYPES[out.dtype], idtype)
    arrays = {"x": wide.detach(), "y": other.detach(), "g": out}
    _run(structure, problem, tokens, arrays)
    return out.to(x.dtype)


def _outer_backward(ctx: Any, grad: Tensor) -> Any:
    x, y, indptr, indices, _, _ = saved(ctx)
    for_x, for_y, *_ = ctx.needs_input_grad
    sizes = indptr, indices, None, y.shape[-1], x.shape[-1]
    return (
        block_linear(y, grad, *sizes, True) if for_x else None,
        block_linear(x, grad, *sizes, False) if for_y else None,
        None, None, None, None,
    )  # fmt: skip


block_outer = define(
    "block_outer(Tensor x, Tensor y, Tensor indptr, Tensor indices, SymInt rows, SymInt cols) "
    "-> Tensor",
    _outer,
    lambda x, y, indptr, indices, rows, cols: x.new_empty(indices.shape[0], cols, rows),
    _outer_backward,
    save_inputs,
)
