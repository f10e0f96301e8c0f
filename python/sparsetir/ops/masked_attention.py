"""Attention with a sparse mask, of heads and batches, with gradients.

On a CPU kernels work in float32 or float64; on a GPU on tensor cores, which take 16-bit types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from tvm.target import Target

from sparsetir.data.mask_blocks import BlockMask, BlockRows
from sparsetir.data.masks import from_elements
from sparsetir.ops import message_kernels
from sparsetir.ops.messages_library import attention_gradients
from sparsetir.ops.operands import resolve
from sparsetir.ops.registry import Gradients, Operation, Operator
from sparsetir.ops.structure import Structure, structure_of
from sparsetir.ops.tensors import DTYPES, check_tensor, kernel_by, launch, scale_of, target_of
from sparsetir.planning.request import default_threads
from sparsetir.records.task import Config
from sparsetir.runtime.pool import profitable
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.operators.block_attention import BlockAttention as OfBlocks
from sparsetir.schedules.operators.block_attention_backward import (
    BlockAttentionBackward as OfBlocksBackward,
)
from sparsetir.schedules.passes.inline_exponentials import EXPONENTIAL
from sparsetir.schedules.targets import is_gpu, vector_registers
from sparsetir.schedules.templates.block_attention import BlockTiles
from sparsetir.schedules.templates.registry import templates_for

NAME = "sparse_attention"
# The cost of a position in a block, by block size, and of a single element.
PLACE, ELEMENT = {64: 1.0, 32: 1.1, 16: 1.7}, 16.0
COLUMNS = 16  # columns of a tensor-core tile


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: object, scale: float | None = None
) -> Tensor:
    """Out[i] = sum over the j of row i of the mask of softmax(scale * q[i] . k[j]) * v[j].

    Equals `scaled_dot_product_attention` with a dense mask, except that rows without elements give
    zeros and zero gradients. Positions outside the mask have weight zero: if one shares a block
    with elements, an infinity or NaN in its v gives NaN, as it does there.

    Parameters
    ----------
    q : (batch, heads, m, feat) Tensor
        Queries.
    k : (batch, heads, n, feat) Tensor
        Keys.
    v : (batch, heads, n, width) Tensor
        Values.
    mask : BlockMask or sparse matrix
        An (m, n) :class:`sparsetir.masks.BlockMask`, or a sparse matrix of any kind that
        :func:`sparsetir.ops.resolve` accepts, whose values are ignored. All heads share it.
    scale : float, optional
        The factor of scores; by default 1 / sqrt(feat).

    Returns
    -------
    (batch, heads, m, width) Tensor
        Differentiable once with respect to q, k and v.

    Raises
    ------
    TypeError, ValueError
        For an invalid argument, which the message names.

    Notes
    -----
    Scores and weights are never stored as a whole: besides its result the kernel stores those of a
    block per thread, and the logarithm of each row's sum, from which gradients recompute weights. A
    matrix of elements is stored in blocks if it fills them; otherwise its elements are processed
    one by one. Sums are in float32, or float64 for float64. (SparseTIR, section 4.3.1.)

    On a GPU blocks are multiplied on tensor cores, in float16 or bfloat16; weights of keys are
    rounded to that type there. Matrices of elements, and blocks of wider types, are processed
    element by element.
    """
    _check(q, k, v)
    m, n = q.shape[2], k.shape[2]
    scale = scale_of(NAME, scale, q.shape[-1])
    if not isinstance(mask, BlockMask):
        operand = resolve(mask, None, (m, n), NAME, "mask")
        _check_mask((operand.m, operand.n), operand.col.device, q, k)
        return element_attention(q, k, v, operand.rowptr, operand.col, scale)[0]
    _check_mask(mask.shape, mask.device, q, k)
    if not _in_tiles(q):
        return element_attention(q, k, v, *mask.csr, scale)[0]
    return block_attention(q, k, v, *mask.rows, *mask.columns, scale)[0]


def _in_tiles(q: Tensor) -> bool:
    """Whether q's device multiplies blocks of its type: tensor cores take 16-bit types only."""
    return q.device.type == "cpu" or q.element_size() == 2


@dataclass
class _Attention(Operation[tuple[Tensor, Tensor]]):
    """Attention (batch, heads, m, width), and its rows' log-sum-exp (batch, heads, m)."""

    q: Tensor
    k: Tensor
    v: Tensor
    keeps = (0, 1)
    aside = 1

    def fake(self) -> tuple[Tensor, Tensor]:
        q, wide = self.q, torch.promote_types(self.q.dtype, torch.float32)
        out = q.new_empty((*q.shape[:-1], self.v.shape[-1]))
        return out, q.new_empty(q.shape[:-1], dtype=wide)


@dataclass
class _Gradients(Operation[tuple[Tensor, Tensor, Tensor]]):
    """Gradients for q, k and v, which have no gradients themselves."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    grad: Tensor
    autocast = False

    def fake(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x.new_empty(x.shape) for x in (self.q, self.k, self.v))
        return q, k, v

    def gradients(self, grad: Tensor) -> Gradients:
        raise NotImplementedError(f"{NAME}: has no gradients of gradients; ops.attention has")


@dataclass
class _OfBlocks:
    """The blocks of a mask, by rows and by columns, as arguments of an operator."""

    indptr: Tensor
    indices: Tensor
    kinds: Tensor
    bits: Tensor
    indptr_t: Tensor
    indices_t: Tensor
    kinds_t: Tensor
    bits_t: Tensor
    scale: float

    @property
    def rows(self) -> BlockRows:
        return BlockRows(self.indptr, self.indices, self.kinds, self.bits)

    @property
    def columns(self) -> BlockRows:
        return BlockRows(self.indptr_t, self.indices_t, self.kinds_t, self.bits_t)


@dataclass
class BlockAttentionBackward(_OfBlocks, _Gradients):
    """See :func:`gradients_over_blocks`."""

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        tensors = self.q, self.k, self.v, self.out, self.lse, self.grad
        return gradients_over_blocks(*tensors, self.rows, self.columns, self.scale)


block_attention_backward = Operator("block_attention_backward", BlockAttentionBackward)


@dataclass
class BlockAttention(_OfBlocks, _Attention):
    """See :func:`attention_over_blocks`."""

    def run(self) -> tuple[Tensor, Tensor]:
        return attention_over_blocks(self.q, self.k, self.v, self.rows, self.scale)

    def gradients(self, grad: Tensor) -> Gradients:
        tensors = self.q, self.k, self.v, *self.results, grad
        mask, scale = (self.rows, self.columns), self.scale
        return _each(lambda: block_attention_backward(*tensors, *mask[0], *mask[1], scale))


block_attention = Operator("block_attention", BlockAttention)


def _each(compute: Callable[[], tuple[Tensor, Tensor, Tensor]]) -> Gradients:
    """Gradients for q, k and v by name, from a function that computes all three."""
    compute = cache(compute)
    return {name: (lambda i=i: compute()[i]) for i, name in enumerate("qkv")}


@dataclass
class _OfElements:
    """The elements of a mask, as arguments of an operator."""

    rowptr: Tensor
    col: Tensor
    scale: float

    def found(self, n: int) -> tuple[Structure, BlockMask | None]:
        """The structure, and its elements in blocks if that is cheaper than one by one; never on
        GPUs."""
        structure = structure_of(self.rowptr, self.col, n, NAME)
        if structure.device.type != "cpu":
            return structure, None
        return structure, structure.derived(BlockMask, _fitting)


@dataclass
class ElementAttentionBackward(_OfElements, _Gradients):
    """Gradients of attention with a mask of elements."""

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, grad = self.q, self.k, self.v, self.grad
        _, mask = self.found(k.shape[2])
        if mask is not None:
            tensors = q, k, v, self.out, self.lse, grad, mask.rows, mask.columns
            return gradients_over_blocks(*tensors, self.scale)
        outer = q.shape[:2]
        q, k, v, grad = (x.permute(2, 0, 1, 3).flatten(1, 2) for x in (q, k, v, grad))
        gradients = attention_gradients(self.rowptr, self.col, q, k, v, grad, self.scale)
        each = (gradients[name]().unflatten(1, outer).permute(1, 2, 0, 3) for name in "qkv")
        dq, dk, dv = (x.contiguous() for x in each)
        return dq, dk, dv


element_attention_backward = Operator("element_attention_backward", ElementAttentionBackward)


@dataclass
class ElementAttention(_OfElements, _Attention):
    """Attention with a mask of elements; logarithms are unused unless these are in blocks."""

    def run(self) -> tuple[Tensor, Tensor]:
        q, k, v = self.q, self.k, self.v
        structure, mask = self.found(k.shape[2])
        if mask is not None:
            return attention_over_blocks(q, k, v, mask.rows, self.scale)
        outer = q.shape[:2]
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        out = message_kernels.attention(structure, q, k, v, self.scale, heads_first=True)
        return out.unflatten(0, outer), self.fake()[1].zero_()

    def gradients(self, grad: Tensor) -> Gradients:
        arguments = self.q, self.k, self.v, *self.results, grad, self.rowptr, self.col, self.scale
        return _each(lambda: element_attention_backward(*arguments))


element_attention = Operator("element_attention", ElementAttention)


def _fitting(structure: Structure) -> BlockMask | None:
    indptr, indices, shape = structure.pattern
    row = np.repeat(np.arange(shape[0]), np.diff(indptr))
    costs: dict[int, float] = {}
    for block, place in PLACE.items():
        wide = -(-shape[1] // block)
        count = len(np.unique(row // block * np.int64(wide) + indices // block))
        costs[block] = place * count * block**2
    best = min(costs, key=lambda block: costs[block])
    if not structure.nnz or costs[best] > ELEMENT * structure.nnz:
        return None
    try:
        return from_elements(indptr, indices, shape, best)
    except ValueError:  # some elements are stored several times
        return None


# -- kernels of blocks ----------------------------------------------------------------------------


def attention_over_blocks(
    q: Tensor, k: Tensor, v: Tensor, rows: BlockRows, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention (batch, heads, m, width), and its rows' log-sum-exp (batch, heads, m).

    q, k, v : (batch, heads, m, feat), (batch, heads, n, feat) and (batch, heads, n, width)

    The logarithms are in float32 or float64. CPU kernels take 16-bit types as float32.
    """
    (*outer, m, _), width, dtype = q.shape, v.shape[-1], q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    if not math.prod((*outer, m, width, len(rows.indices))):
        out = q.new_zeros((*outer, m, width))
        return out, q.new_full((*outer, m), -math.inf, dtype=wide)
    block = rows.bits.shape[1]
    q, k, v = (_whole(x, block) for x in (q, k, v))
    out, lse = q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(q.shape[:2], dtype=wide)
    problem = OfBlocks(block, q.shape[2], v.shape[2], DTYPES[q.dtype])
    _run(problem, rows, scale, k, q=q, k=k, v=v, out=out, lse=lse)
    return _cut(out[..., :width], outer, m).to(dtype), _cut(lse, outer, m)


def gradients_over_blocks(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, rows: BlockRows,
    columns: BlockRows, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of :func:`attention_over_blocks` for q, k and v.

    out, lse : its results
    grad : (batch, heads, m, width)
    columns : the blocks of the transposed mask
    """
    (*outer, m, feat), (n, width), dtype = q.shape, v.shape[2:], q.dtype
    if not math.prod((*outer, m, width, len(rows.indices))):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    wide, block = torch.promote_types(dtype, torch.float32), rows.bits.shape[1]
    delta = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    q, k, v, grad = (_whole(x, block) for x in (q, k, v, grad))
    lse, delta = (_in_rows(x.flatten(0, 1), block, 0) for x in (lse.unsqueeze(-1), delta))
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    arrays = {"q": q, "k": k, "v": v, "grad": grad, "lse": lse[..., 0], "delta": delta[..., 0]}
    outputs = ({"dq": gradients[0]}, {"dk": gradients[1], "dv": gradients[2]})
    for keys, (stored, results) in enumerate(zip((rows, columns), outputs, strict=True)):
        problem = OfBlocksBackward(block, q.shape[2], v.shape[2], DTYPES[q.dtype], bool(keys))
        of = q if keys else k
        _run(problem, stored, scale, of, **arrays, **results)
    dq, dk, dv = (_cut(x, outer, size) for x, size in zip(gradients, (m, n, n), strict=True))
    return dq[..., :feat].to(dtype), dk[..., :feat].to(dtype), dv[..., :width].to(dtype)


def _whole(x: Tensor, block: int) -> Tensor:
    """Reshape (batch, heads, rows, features) to (batch * heads, rows of whole blocks, features)."""
    x = x.flatten(0, 1)
    if x.device.type == "cpu":
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return _in_rows(x, block, int(not x.shape[2]))
    return _in_rows(x, block, -x.shape[2] % COLUMNS or COLUMNS * (not x.shape[2]))


def _in_rows(x: Tensor, block: int, features: int) -> Tensor:
    """Pad x to whole blocks of rows, and with `features` more features."""
    rows = -x.shape[1] % block
    return (pad(x, (0, features, 0, rows)) if rows or features else x).contiguous()


def _cut(x: Tensor, outer: Sequence[int], rows: int) -> Tensor:
    """Drop padding rows; return (batch, heads, rows, ..)."""
    return x[:, :rows].unflatten(0, tuple(outer)).contiguous()


def _run(
    problem: OfBlocks | OfBlocksBackward,
    rows: BlockRows,
    scale: float,
    across: Tensor,
    **arrays: Tensor,
) -> None:
    """Run the kernel of `problem` on arrays of matching shapes.

    across : the operand that columns of blocks index
    """
    block, heads = problem.block, len(across)
    work = len(rows.indices) * heads * block**2 * (problem.feat + problem.width + EXPONENTIAL)
    parallel = profitable(default_threads(), work)
    kernel = kernel_by(_tiles, problem, target_of(across.device), parallel)
    named = {"indptr": rows.indptr, "indices": rows.indices, "kind": rows.kinds, "bits": rows.bits}
    sizes = {"blocks": len(rows.indices), "kinds": len(rows.bits), "heads": heads, "scale": scale}
    sizes |= {"rows": len(rows.indptr) - 1, "cols": across.shape[1] // block}
    arrays = {name: x.unflatten(1, (-1, block)) for name, x in arrays.items()}
    launch(kernel, {**arrays, **named, **sizes})


def _tiles(problem: OfBlocks | OfBlocksBackward, target: Target, parallel: bool) -> Config:
    if is_gpu(target):
        return templates_for(problem, gpu=True)[0].config()
    size, acc = vector_registers(target), problem.accumulator
    return BlockTiles.for_block(problem.block, size, acc, parallel)


# -- arguments ------------------------------------------------------------------------------------


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless the operands' shapes, types and devices agree."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(NAME, name, x, q, "'q'")
        if x.dim() != 4:
            expected = "a dense tensor (batch, heads, length, head size)"
            raise wrong(NAME, name, expected, f"shape {tuple(x.shape)}")
        if x.device != q.device:
            raise wrong(NAME, name, f"to be on {q.device} as 'q'", x.device)
        if x.shape[:2] != q.shape[:2]:
            raise wrong(
                NAME,
                name,
                f"batch and heads {tuple(q.shape[:2])} as 'q'",
                f"shape {tuple(x.shape)}",
            )
    if k.shape[3] != q.shape[3]:
        raise wrong(NAME, "k", f"head size {q.shape[3]} as 'q'", k.shape[3])
    if v.shape[2] != k.shape[2]:
        raise wrong(NAME, "v", f"length {k.shape[2]} as 'k'", v.shape[2])


def _check_mask(shape: tuple[int, ...], device: torch.device, q: Tensor, k: Tensor) -> None:
    if tuple(shape) != (q.shape[2], k.shape[2]):
        expected = f"shape {(q.shape[2], k.shape[2])}, the lengths of 'q' and 'k'"
        raise wrong(NAME, "mask", expected, tuple(shape))
    if device != q.device:
        raise wrong(NAME, "mask", f"to be on {q.device} as 'q'", device)
