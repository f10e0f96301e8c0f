"""Linear maps with weights in blocks as torch operators, with their gradients.

W (rows, cols) is stored in blocks of r x c: `values` (blocks, c, r) holds each by columns, `indptr`
(rows / r + 1,) and `indices` (blocks,) are the CSR pattern of the blocks. x is (..., cols).

On a GPU tensor cores multiply blocks of 16-bit types; other products, and gradients of W, are
computed densely there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from tvm.target import Target

from sparsetir.formats import BSR
from sparsetir.ops.registry import Gradients, Operation, Operator
from sparsetir.ops.structure import Structure, structure_of
from sparsetir.ops.tensors import DTYPES, check_tensor, kernel_by, launch, target_of, wide_tensor
from sparsetir.planning.request import default_threads
from sparsetir.planning.run_plan import compiled_by
from sparsetir.records.task import Config
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.pool import profitable
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.operators.block_linear import BlockLinear, BlockOuter
from sparsetir.schedules.operators.block_spmm import BlockSpmm
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.search.by_format import on_engine
from sparsetir.schedules.search.choose import Statistics
from sparsetir.schedules.targets import vector_registers
from sparsetir.schedules.templates.block_linear import BlockTile


def _has_kernels(x: Tensor) -> bool:
    """Whether x's device has kernels for all types; others use dense or blocked products."""
    return x.device.type == "cpu"


def _by_blocks(x: Tensor, indices: Tensor, rows: int, cols: int, tokens: int) -> Config | None:
    """The tensor-core config for blocks of this size, or None if x's device has none."""
    if _has_kernels(x) or indices.dtype != torch.int32:
        return None
    problem, stats = Spmm(DTYPES[x.dtype]), Statistics(rows, cols, rows * cols, tokens)
    return next(iter(on_engine(problem, None, stats, target_of(x.device), BSR(rows, cols))), None)


def _product_by_blocks(x: Tensor, w: Tensor, structure: Structure, config: Config) -> Tensor:
    """The product (tokens, rows) of x (tokens, columns) and w (blocks, columns, rows of a block).

    The kernel has tokens in the last dimension, so x and the result are transposed.
    """
    (tokens, _), (blocks, cols, rows) = x.shape, w.shape
    kernel = compiled_by(config, BlockSpmm(rows, cols, DTYPES[x.dtype]), target_of(x.device))
    out = x.new_empty(1, structure.m, rows, tokens)
    arrays = {
        "a": w.transpose(1, 2)[None],
        "b": x.t().reshape(1, structure.n, cols, tokens),
        "out": out,
    }
    sizes = {"heads": 1, "mb": structure.m, "nb": structure.n, "blocks": blocks, "feat": tokens}
    launch(kernel, {**arrays, **sizes, "indptr": structure.rowptr, "indices": structure.col})
    return out.view(-1, tokens).t()


def _flat(x: Tensor) -> Tensor:
    """Flatten x to (tokens, features)."""
    return x.reshape(-1, x.shape[-1])


def _structure(indptr: Tensor, indices: Tensor, columns: int) -> Structure:
    """The structure of the blocks; columns : the number of block columns."""
    return structure_of(indptr, indices, columns, "block_linear")


def _tile(problem: BlockLinear, target: Target, nnz: int, tokens: int, threads: int) -> BlockTile:
    """The tile for `nnz` blocks and `tokens` tokens on a CPU."""
    parallel = profitable(threads, nnz * problem.rows * problem.cols * tokens)
    return BlockTile.for_block(problem, vector_registers(target), tokens, parallel)


def _run(
    structure: Structure, problem: BlockLinear, tokens: int, arrays: dict[str, Tensor]
) -> None:
    """Run the kernel of `problem` on arrays of matching shapes."""
    options = target_of(structure.device), structure.nnz, tokens, default_threads()
    kernel = kernel_by(_tile, problem, *options)
    sizes = {"tokens": tokens, "m": structure.m, "n": structure.n, "blocks": structure.nnz}
    launch(kernel, {**arrays, **sizes, "indptr": structure.rowptr, "indices": structure.col})


def _check(caller: str, name: str, x: Tensor, features: int, like: Tensor | None = None) -> None:
    check_tensor(caller, name, x, like)
    if x.dim() < 1 or x.shape[-1] != features:
        raise wrong(caller, name, f"{features} features", f"shape {tuple(x.shape)}")


@dataclass
class Linear(Operation[Tensor]):
    """x W^T + bias, or x W if `transposed`."""

    x: Tensor
    values: Tensor
    indptr: Tensor
    indices: Tensor
    bias: Tensor | None
    rows: int
    cols: int
    transposed: bool

    def run(self) -> Tensor:
        x, values, bias, transposed = self.x, self.values.detach(), self.bias, self.transposed
        sizes = self.rows, self.cols
        out_features, in_features = sizes[::-1] if transposed else sizes
        _check("block_linear", "x", x, in_features, values)
        out = x.new_empty((*x.shape[:-1], out_features))
        if not out.numel():
            return out
        blocks, c, r = values.shape
        structure = _structure(self.indptr, self.indices, self.cols // c)
        tokens = math.prod(x.shape[:-1])
        config = _by_blocks(x, self.indices, *((c, r) if transposed else (r, c)), tokens)
        by_blocks = config if blocks else None
        wide = values if by_blocks is not None else wide_tensor(values)
        if transposed:
            structure = structure.transposed
            wide = wide.transpose(1, 2)
            wide = (wide if structure.order is None else wide[structure.order]).contiguous()
            r, c = c, r
        if by_blocks is not None:
            product = _product_by_blocks(_flat(x).detach(), wide, structure, by_blocks)
            product = product if bias is None else product + bias.detach().to(x.dtype)
            return product.contiguous().view(out.shape)
        if not blocks or not _has_kernels(x):
            dense = wide.new_zeros(structure.n, structure.m, c, r)
            dense[structure.col.long(), structure.rows.long()] = wide
            product = wide_tensor(x) @ dense.transpose(1, 2).reshape(in_features, out_features)
            return (product if bias is None else product + bias.to(product.dtype)).to(x.dtype)
        problem = BlockLinear(r, c, DTYPES[x.dtype], dtype_name(structure.col), bias is not None)
        arrays = {"x": wide_tensor(_flat(x)), "w": wide, "y": _flat(out)}
        if bias is not None:
            arrays["bias_"] = wide_tensor(bias)
        _run(structure, problem, tokens, arrays)
        return out

    def fake(self) -> Tensor:
        return self.x.new_empty((*self.x.shape[:-1], self.cols if self.transposed else self.rows))

    def gradients(self, grad: Tensor) -> Gradients:
        x, values, pattern, back = self.x, self.values, (self.indptr, self.indices), self.transposed
        ends = (grad, x) if back else (x, grad)
        sizes = self.rows, self.cols, not back
        return {
            "x": lambda: block_linear(grad, values, *pattern, None, *sizes),
            "values": lambda: block_outer(*ends, *pattern, values.shape[2], values.shape[1]),
            "bias": lambda: _flat(grad).sum(0),
        }


block_linear = Operator("block_linear", Linear)


@dataclass
class Outer(Operation[Tensor]):
    """Sums of y[.., i] * x[.., j] at the stored blocks of W, (blocks, cols, rows)."""

    x: Tensor
    y: Tensor
    indptr: Tensor
    indices: Tensor
    rows: int
    cols: int

    def run(self) -> Tensor:
        x, y, indices, (rows, cols) = self.x, self.y, self.indices, (self.rows, self.cols)
        check_tensor("block_outer", "y", y, x)
        tokens, wide, other = math.prod(x.shape[:-1]), wide_tensor(_flat(x)), wide_tensor(_flat(y))
        if not len(indices) or not tokens:
            return self.fake().zero_()
        structure = _structure(self.indptr, indices, x.shape[-1] // cols)
        if not _has_kernels(x):
            full = (wide.T @ other).view(structure.n, cols, structure.m, rows).transpose(1, 2)
            return full[structure.col.long(), structure.rows.long()].to(x.dtype)
        out = wide.new_empty(len(indices), cols, rows)
        problem = BlockOuter(rows, cols, DTYPES[out.dtype], dtype_name(structure.col))
        _run(structure, problem, tokens, {"x": wide, "y": other, "g": out})
        return out.to(x.dtype)

    def fake(self) -> Tensor:
        return self.x.new_empty(self.indices.shape[0], self.cols, self.rows)

    def gradients(self, grad: Tensor) -> Gradients:
        x, y = self.x, self.y
        arguments = grad, self.indptr, self.indices, None, y.shape[-1], x.shape[-1]
        return {
            "x": lambda: block_linear(y, *arguments, True),
            "y": lambda: block_linear(x, *arguments, False),
        }


block_outer = Operator("block_outer", Outer)
