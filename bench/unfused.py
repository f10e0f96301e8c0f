"""Attention over blocks as three steps, with scores in memory: figure 16 of the SparseTIR paper.

Products of Q and K where the mask has blocks, a softmax of their rows by torch, and the product of
the weights with V; the two products for all heads at once.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import tvm_ffi

from sparsetir.formats import BSR
from sparsetir.planning.compiled import compiled
from sparsetir.runtime.pipeline import lower
from sparsetir.runtime.targets import resolve_target
from sparsetir.schedules.gpu import block_sddmm as block_sddmm_gpu
from sparsetir.schedules.gpu import spmm_tensor_cores
from sparsetir.schedules.gpu.block_attention import WarpTiles
from sparsetir.schedules.gpu.spmm_tensor_cores import TensorCores
from sparsetir.schedules.operators import block_sddmm, block_spmm
from sparsetir.schedules.operators.block_sddmm import BlockSddmm
from sparsetir.schedules.operators.block_spmm import BlockSpmm


def scheduled(block: int, feat: int, dtype: str) -> dict[str, tuple[Any, Any, Any, Any]]:
    """(problem, program, schedule, config) of both products on tensor cores."""
    sddmm, spmm = BlockSddmm(block, block, feat, dtype), BlockSpmm(block, block, dtype)
    config = TensorCores.for_features(BSR(block, block), feat, dtype)
    return {
        "sddmm": (sddmm, block_sddmm.program(sddmm), block_sddmm_gpu.apply, WarpTiles()),
        "spmm": (spmm, block_spmm.program(spmm), spmm_tensor_cores.apply, config),
    }


class Unfused:
    """Attention with a mask whose blocks divide its sizes.

    mask : on the device of the operands
    kernels : what kernels are compiled for: "cuda", or "llvm" (default schedules: for a rehearsal)
    """

    def __init__(self, mask: Any, feat: int, dtype: str, kernels: Any) -> None:
        self.mask, self.block = mask, mask.block
        if any(n % mask.block for n in mask.shape):
            raise ValueError(f"blocks of {mask.block} stick out of {mask.shape}")
        self.indptr, self.indices = mask.rows.indptr, mask.rows.indices
        counts = self.indptr.diff().long()
        self.rows = torch.repeat_interleave(torch.arange(len(counts), device=mask.device), counts)
        full = bool(mask.full.all())
        self.outside = None if full else ~self._blocks_of(mask.to_dense())
        target = resolve_target(kernels)
        self.kernels = {}
        for name, (problem, program, apply, config) in scheduled(self.block, feat, dtype).items():
            how = (apply, config) if kernels == "cuda" else (None, None)
            self.kernels[name] = compiled(
                (problem, how[1]), target,
                lambda program=program, how=how: lower(program, *how, target),
            )  # fmt: skip

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        """(1, heads, length, feat), of operands of that shape."""
        return self.spmm(self.softmax(self.sddmm(q, k), q.shape[-1] ** -0.5), v)

    def sddmm(self, q: Any, k: Any) -> Any:
        """(heads, blocks, block, block) scores."""
        x, y = (self._in_blocks(t) for t in (q, k))
        out = x.new_empty(len(x), len(self.indices), self.block, self.block)
        self._run("sddmm", x=x, y=y, out=out, mb=x.shape[1], nb=y.shape[1])
        return out

    def softmax(self, scores: Any, scale: float) -> Any:
        """Weights, of scores."""
        wide = scores.float() * scale
        if self.outside is not None:
            wide = wide.masked_fill(self.outside, -torch.inf)
        heads, shape = len(wide), (len(wide), len(self.indptr) - 1, self.block)
        at = self.rows[None, :, None].expand(heads, -1, self.block)
        top = wide.new_full(shape, -torch.inf).scatter_reduce(1, at, wide.amax(-1), "amax")
        powers = (wide - top[:, self.rows, :, None]).exp()
        total = wide.new_zeros(shape).index_add(1, self.rows, powers.sum(-1))
        return (powers / total[:, self.rows, :, None]).to(scores.dtype)

    def spmm(self, weights: Any, v: Any) -> Any:
        """The result."""
        b = self._in_blocks(v)
        out = b.new_empty(len(b), len(self.indptr) - 1, self.block, b.shape[-1])
        sizes = {"mb": out.shape[1], "nb": b.shape[1], "feat": b.shape[-1]}
        self._run("spmm", a=weights, b=b, out=out, **sizes)
        return out.view(1, len(b), -1, b.shape[-1])

    def _in_blocks(self, x: Any) -> Any:
        return x[0].unflatten(1, (-1, self.block))

    def _blocks_of(self, dense: Any) -> Any:
        m, n = (size // self.block for size in dense.shape)
        apart = dense.view(m, self.block, n, self.block).transpose(1, 2)
        return apart[self.rows, self.indices.long()]

    def _run(self, name: str, **given: Any) -> None:
        kernel, heads = self.kernels[name], len(given["out"])
        dims = {n: len(kernel.signature.shapes[kernel.signature.position[n]]) for n in given
                if torch.is_tensor(given[n])}  # fmt: skip
        # Kernels see heads and blocks as one dimension, some of default schedules as two.
        given |= {n: given[n].flatten(0, 1) for n, d in dims.items() if given[n].dim() > d}
        given |= {"indptr": self.indptr, "indices": self.indices, "blocks": len(self.indices)}
        stream = tvm_ffi.use_torch_stream() if given["out"].is_cuda else contextlib.nullcontext()
        with stream:
            kernel(**given, heads=heads)
