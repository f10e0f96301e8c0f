"""Runs the kernels of attention over blocks on torch tensors, without gradients.

On a CPU kernels work in float32 or float64; on a GPU on tensor cores, which take 16-bit types.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from tvm.target import Target

from sparsetir.data.mask_blocks import BlockRows
from sparsetir.ops.launch import DTYPES, launch, target_of
from sparsetir.planning.compiled import compiled_by
from sparsetir.planning.request import default_threads
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.pool import pays
from sparsetir.schedules.default import is_gpu, vector_bits
from sparsetir.schedules.gpu.block_attention import WarpTiles
from sparsetir.schedules.operators.block_attention import BlockAttention
from sparsetir.schedules.operators.block_attention_backward import BlockAttentionBackward
from sparsetir.schedules.templates.block_attention import BlockTiles
from sparsetir.schedules.templates.message_tiles import EXPONENTIAL

COLUMNS = 16  # of what tensor cores multiply


def attention(
    q: Tensor, k: Tensor, v: Tensor, rows: BlockRows, scale: float
) -> tuple[Tensor, Tensor]:
    """(batch, heads, m, width) attention, and (batch, heads, m) logarithms of sums of powers.

    q, k, v : (batch, heads, m, feat), (batch, heads, n, feat) and (batch, heads, n, width)

    The logarithms are in float32, or float64. Of types with 16 bits, a CPU's kernels get float32.
    """
    (*outer, m, _), width, dtype = q.shape, v.shape[-1], q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    if not math.prod((*outer, m, width, len(rows.indices))):
        out = q.new_zeros((*outer, m, width))
        return out, q.new_full((*outer, m), -math.inf, dtype=wide)
    block = rows.bits.shape[1]
    q, k, v = (_whole(x, block) for x in (q, k, v))
    out, lse = q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(q.shape[:2], dtype=wide)
    problem = BlockAttention(block, q.shape[2], v.shape[2], DTYPES[q.dtype])
    _run(problem, rows, scale, k, q=q, k=k, v=v, out=out, lse=lse)
    return _given(out[..., :width], outer, m).to(dtype), _given(lse, outer, m)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, rows: BlockRows,
    columns: BlockRows, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Those of :func:`attention` for q, k and v.

    out, lse : what it gave
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
    found = [torch.empty_like(x) for x in (q, k, v)]
    given = {"q": q, "k": k, "v": v, "grad": grad, "lse": lse[..., 0], "delta": delta[..., 0]}
    made = ({"dq": found[0]}, {"dk": found[1], "dv": found[2]})
    for keys, (stored, results) in enumerate(zip((rows, columns), made, strict=True)):
        problem = BlockAttentionBackward(block, q.shape[2], v.shape[2], DTYPES[q.dtype], bool(keys))
        of = q if keys else k
        _run(problem, stored, scale, of, **given, **results)
    dq, dk, dv = (_given(x, outer, size) for x, size in zip(found, (m, n, n), strict=True))
    return dq[..., :feat].to(dtype), dk[..., :feat].to(dtype), dv[..., :width].to(dtype)


def _whole(x: Tensor, block: int) -> Tensor:
    """(batch * heads, rows of whole blocks, features) of (batch, heads, rows, features)."""
    x = x.flatten(0, 1)
    if x.device.type == "cpu":
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return _in_rows(x, block, int(not x.shape[2]))
    return _in_rows(x, block, -x.shape[2] % COLUMNS or COLUMNS * (not x.shape[2]))


def _in_rows(x: Tensor, block: int, features: int) -> Tensor:
    """With rows for whole blocks, and more features."""
    rows = -x.shape[1] % block
    return (pad(x, (0, features, 0, rows)) if rows or features else x).contiguous()


def _given(x: Tensor, outer: Any, rows: int) -> Tensor:
    """What was asked for, of what belongs to whole blocks; (batch, heads, rows, ..)."""
    return x[:, :rows].unflatten(0, tuple(outer)).contiguous()


def _run(problem: Any, rows: BlockRows, scale: float, across: Tensor, **arrays: Tensor) -> None:
    """Compile a kernel if it is new, and run it.

    across : an operand that the columns of blocks belong to
    """
    block, heads = problem.block, len(across)
    work = len(rows.indices) * heads * block**2 * (problem.feat + problem.width + EXPONENTIAL)
    kernel = _kernel(problem, target_of(across.device), pays(default_threads(), work))
    named = {"indptr": rows.indptr, "indices": rows.indices, "kind": rows.kinds, "bits": rows.bits}
    sizes = {"blocks": len(rows.indices), "kinds": len(rows.bits), "heads": heads, "scale": scale}
    sizes |= {"rows": len(rows.indptr) - 1, "cols": across.shape[1] // block}
    arrays = {name: x.unflatten(1, (-1, block)) for name, x in arrays.items()}
    launch(kernel, {**arrays, **named, **sizes})


@lru_cache(256)
def _kernel(problem: Any, target: Target, parallel: bool) -> Kernel:
    if is_gpu(target):
        return compiled_by(WarpTiles(), problem, target)
    bits, acc = vector_bits(target), problem.accumulator
    return compiled_by(BlockTiles.for_block(problem.block, bits, acc, parallel), problem, target)
