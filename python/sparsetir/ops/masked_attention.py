"""Attention with a sparse mask, of heads and batches, with gradients."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetir.data.mask_blocks import BlockMask, BlockRows
from sparsetir.data.masks import from_elements
from sparsetir.ops import block_kernels, message_kernels
from sparsetir.ops.messages_library import attention_gradients
from sparsetir.ops.operands import resolve
from sparsetir.ops.registry import define, save, saved
from sparsetir.ops.structure import DTYPES, Structure, structure_of
from sparsetir.runtime.arrays import dtype_name

WHO = "sparse_attention"
# What a place in a block of some size costs, and what an element costs by itself.
PLACE, ELEMENT = {64: 1.0, 32: 1.1, 16: 1.7}, 16.0


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None = None
) -> Tensor:
    """Out[i] = sum over the j of row i of the mask of softmax(scale * q[i] . k[j]) * v[j].

    The same as `scaled_dot_product_attention` with the mask as a dense one, but for rows without
    elements, which give zeros and gradients of zero. What is not in the mask has weight zero: where
    it shares a block with elements, an infinity or NaN of its v makes NaN, as it does there.

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
        :func:`sparsetir.ops.resolve` takes, whose values play no part. All heads share it.
    scale : float, optional
        By default 1 / sqrt(feat).

    Returns
    -------
    (batch, heads, m, width) Tensor
        Differentiable once with respect to q, k and v.

    Raises
    ------
    TypeError, ValueError
        Naming the argument.

    Notes
    -----
    Scores and weights are never in memory as a whole: beside its result the kernel takes a block's
    for each thread, and the logarithm of a row's sum for the gradients, which make weights again. A
    matrix of elements is put in blocks where it fills them; elsewhere its elements are gone through
    one by one. Sums are in float32, for float64 in float64. (SparseTIR, section 4.3.1.)

    On a GPU blocks are multiplied on tensor cores, in float16 or bfloat16; weights of keys are
    rounded to that type there. Matrices of elements, and blocks of wider types, are gone through
    element by element.
    """
    _check(q, k, v)
    m, n = q.shape[2], k.shape[2]
    if scale is None:
        scale = 1 / math.sqrt(max(1, q.shape[-1]))
    elif not isinstance(scale, numbers.Real):
        raise TypeError(f"{WHO}: argument 'scale': expected a number, got {type(scale).__name__}")
    if not isinstance(mask, BlockMask):
        operand = resolve(mask, None, (m, n), WHO, "mask")
        _check_mask((operand.m, operand.n), operand.col.device, q, k)
        return element_attention(operand.rowptr, operand.col, q, k, v, float(scale))[0]
    _check_mask(mask.shape, mask.device, q, k)
    if not _in_tiles(q):
        return element_attention(*mask.csr, q, k, v, float(scale))[0]
    return block_attention(q, k, v, *mask.rows, *mask.columns, float(scale))[0]


def _in_tiles(q: Tensor) -> bool:
    """Whether kernels multiply blocks of this type there: tensor cores take 16 bits alone."""
    return q.device.type == "cpu" or q.element_size() == 2


# -- blocks ---------------------------------------------------------------------------------------

PATTERN = ", ".join(f"Tensor {name}" for name in BlockRows._fields)
TRANSPOSED = ", ".join(f"Tensor {name}_t" for name in BlockRows._fields)
FIELDS = len(BlockRows._fields)


def _block_kernel(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return block_kernels.attention(q, k, v, BlockRows(*rest[:FIELDS]), rest[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    save(ctx, *inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _block_gradients(ctx: Any, grad: Tensor, _: Any) -> Any:
    q, k, v, *pattern, scale, out, lse = saved(ctx)
    found = block_attention_backward(q, k, v, out, lse, grad, *pattern, scale)
    return *found, *(None for _ in pattern), None


def _block_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse, grad, *pattern, scale = args
    rows, columns = BlockRows(*pattern[:FIELDS]), BlockRows(*pattern[FIELDS:])
    return block_kernels.gradients(q, k, v, out, lse, grad, rows, columns, scale)


def _fake(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=wide)


def _fake_gradients(*given: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in given)


def _no_second(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError(f"{WHO}: has no gradients of gradients; ops.attention has")


block_attention_backward = define(
    "block_attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor grad, "
    f"{PATTERN}, {TRANSPOSED}, float scale) -> (Tensor, Tensor, Tensor)",
    _block_backward,
    lambda q, k, v, *_: _fake_gradients(q, k, v),
    _no_second,
    lambda ctx, inputs, output: None,
    autocast=False,
)  # fmt: skip

block_attention = define(
    f"block_attention(Tensor q, Tensor k, Tensor v, {PATTERN}, {TRANSPOSED}, float scale) "
    "-> (Tensor, Tensor)",
    _block_kernel,
    lambda q, k, v, *_: _fake(q, v),
    _block_gradients,
    _save,
)


# -- elements -------------------------------------------------------------------------------------


def _element_kernel(
    rowptr: Tensor, col: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    structure = structure_of(rowptr, col, k.shape[2], WHO)
    mask = _in_blocks(structure)
    if mask is not None:
        return block_kernels.attention(q, k, v, mask.rows, scale)
    outer, lse = q.shape[:2], _fake(q, v)[1].zero_()  # not used
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out = message_kernels.attention(structure, q, k, v, scale, heads_first=True)
    return out.unflatten(0, outer), lse


def _element_gradients(ctx: Any, grad: Tensor, _: Any) -> Any:
    rowptr, col, q, k, v, scale, out, lse = saved(ctx)
    found = element_attention_backward(rowptr, col, q, k, v, out, lse, grad, scale)
    return None, None, *found, None


def _element_backward(
    rowptr: Tensor, col: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    grad: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    mask = _in_blocks(structure_of(rowptr, col, k.shape[2], WHO))
    if mask is not None:
        return block_kernels.gradients(q, k, v, out, lse, grad, mask.rows, mask.columns, scale)
    outer = q.shape[:2]
    q, k, v, grad = (x.permute(2, 0, 1, 3).flatten(1, 2) for x in (q, k, v, grad))
    found = attention_gradients(rowptr, col, q, k, v, grad, scale, (True, True, True))
    dq, dk, dv = (x.unflatten(1, outer).permute(1, 2, 0, 3).contiguous() for x in found)
    return dq, dk, dv


element_attention_backward = define(
    "element_attention_backward(Tensor rowptr, Tensor col, Tensor q, Tensor k, Tensor v, "
    "Tensor out, Tensor lse, Tensor grad, float scale) -> (Tensor, Tensor, Tensor)",
    _element_backward,
    lambda rowptr, col, q, k, v, *_: _fake_gradients(q, k, v),
    _no_second,
    lambda ctx, inputs, output: None,
    autocast=False,
)

element_attention = define(
    "element_attention(Tensor rowptr, Tensor col, Tensor q, Tensor k, Tensor v, float scale) "
    "-> (Tensor, Tensor)",
    _element_kernel,
    lambda rowptr, col, q, k, v, scale: _fake(q, v),
    _element_gradients,
    _save,
)


def _in_blocks(structure: Structure) -> BlockMask | None:
    """The elements in blocks where that costs less than one by one; None elsewhere, on GPUs too."""
    if structure.device.type != "cpu":
        return None
    return structure.derived(BlockMask, _fitting)


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
    except ValueError:  # some are there several times
        return None


# -- arguments ------------------------------------------------------------------------------------


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless operands fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{WHO}: argument '{name}': expected a tensor, got {type(x).__name__}")
        if x.layout is not torch.strided or x.dim() != 4:
            raise ValueError(
                f"{WHO}: argument '{name}': expected a dense tensor (batch, heads, length, head "
                f"size), got {x.layout} of shape {tuple(x.shape)}"
            )
        if x.dtype not in DTYPES:
            raise TypeError(
                f"{WHO}: argument '{name}': expected {', '.join(DTYPES.values())}, got "
                f"{dtype_name(x)}"
            )
        if x.device != q.device:
            raise ValueError(
                f"{WHO}: argument '{name}': expected to be on {q.device} as 'q', got {x.device}"
            )
        if x.shape[:2] != q.shape[:2]:
            raise ValueError(
                f"{WHO}: argument '{name}': expected batch and heads {tuple(q.shape[:2])} as 'q', "
                f"got shape {tuple(x.shape)}"
            )
        if x.dtype != q.dtype and not torch.is_autocast_enabled(q.device.type):
            raise TypeError(
                f"{WHO}: argument '{name}': expected {dtype_name(q)} as 'q', got {dtype_name(x)}"
            )
    if k.shape[3] != q.shape[3]:
        raise ValueError(
            f"{WHO}: argument 'k': expected head size {q.shape[3]} as 'q', got {k.shape[3]}"
        )
    if v.shape[2] != k.shape[2]:
        raise ValueError(
            f"{WHO}: argument 'v': expected length {k.shape[2]} as 'k', got {v.shape[2]}"
        )


def _check_mask(shape: Any, device: torch.device, q: Tensor, k: Tensor) -> None:
    if tuple(shape) != (q.shape[2], k.shape[2]):
        raise ValueError(
            f"{WHO}: argument 'mask': expected shape {(q.shape[2], k.shape[2])}, the lengths of "
            f"'q' and 'k', got {tuple(shape)}"
        )
    if device != q.device:
        raise ValueError(
            f"{WHO}: argument 'mask': expected to be on {q.device} as 'q', got {device}"
        )
