"""Split large local buffers indexed by unrolled loops into separate buffers, one per visit.

TVM keeps a buffer of constant size on the stack, where LLVM promotes it to registers, only below
1024 bytes: 16 vectors of 16 floats just exceed that. Before::

    C_ws = T.sblock_alloc_buffer((4, 4, 16))
    for r in T.unroll(4):
        with T.sblock("spmm_start0"):
            vr = T.axis.spatial(4, r)
            C_ws[vr, ..] = 0.0

After `split_local_buffers(func)`::

    C_ws_0 = T.sblock_alloc_buffer((4, 16))
    ...
    with T.sblock("spmm_start0"):
        C_ws_0[..] = 0.0
    with T.sblock("spmm_start0"):
        C_ws_1[..] = 0.0
    ...
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import ir, s_tir, tirx

from sparsetir.schedules.passes.nests import with_fresh
from sparsetir.sparse_ir.nodes import buffer_var, nodes_of, substitute
from sparsetir.sparse_ir.tir import block_with, values_of
from sparsetir.sparse_ir.traversal import map_expr

# The least bytes of a buffer for which TVM uses its workspace pool; the most that registers hold.
LARGE, MOST = 1024, 4096


def split_local_buffers(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The stage-III function without large local buffers, where possible.

    It is if the first index of every access is the variable of an unrolled loop.
    """
    blocks = nodes_of(s_tir.SBlock, func.body)
    large = [b for block in blocks for b in block.alloc_buffers if _is_large(b)]
    if not large:
        return func
    loops = {x.loop_var: x for x in nodes_of(tirx.For, func.body)}
    bound = {
        var: loops.get(value)
        for realize in nodes_of(s_tir.SBlockRealize, func.body)
        for var, value in values_of(realize).items()
        if isinstance(value, ir.Var)
    }
    parts: dict[Any, list[Any]] = {}
    unrolled = set[Any]()
    for buffer in large:
        around: list[Any] = [
            bound.get(i) if isinstance(i, ir.Var) else None for i in _firsts(func, buffer)
        ]
        count = buffer.ty.shape[0]
        if around and all(loop is not None and _fits(loop, count) for loop in around):
            unrolled |= {loop.loop_var for loop in around}
            shape, dtype, scope = buffer.ty.shape[1:], buffer.ty.dtype, buffer.ty.storage_scope
            names = [f"{buffer.name}_{n}" for n in range(int(count))]
            parts[buffer] = [buffer_var(shape, dtype, name, scope) for name in names]
    if not parts:
        return func
    body = map_expr(func.body, [(tirx.For, lambda x: _visits(x) if x.loop_var in unrolled else x)])
    body = map_expr(body, [(s_tir.SBlockRealize, _without_constants)])
    body = map_expr(
        body,
        [
            (ir.TensorLoad, lambda x: _load(x, parts)),
            (tirx.BufferStore, lambda x: _store(x, parts)),
            (s_tir.SBlock, lambda x: _block(x, parts)),
        ],
    )
    return func.with_body(body)


def _is_large(buffer: Any) -> bool:
    shape = buffer.ty.shape
    constant = all(isinstance(n, tirx.IntImm) for n in shape)
    if buffer.ty.storage_scope != "local" or not constant or len(shape) < 2:
        return False
    size = math.prod(map(int, shape)) * np.dtype(str(buffer.ty.dtype)).itemsize
    return LARGE <= size <= MOST


def _firsts(func: tirx.PrimFunc, buffer: Any) -> list[Any]:
    """The first indices of all accesses."""
    loads = [x for x in nodes_of(ir.TensorLoad, func.body) if x.source.same_as(buffer)]
    stores = [x for x in nodes_of(tirx.BufferStore, func.body) if x.buffer.same_as(buffer)]
    return [x.indices[0] for x in [*loads, *stores]]


def _fits(loop: Any, count: Any) -> bool:
    """Whether a loop is unrolled and runs from 0 up to a count."""
    constant = isinstance(loop.extent, tirx.IntImm) and int(loop.extent) == int(count)
    return loop.kind == tirx.ForKind.UNROLLED and constant


def _visits(loop: Any) -> Any:
    """The visits of a loop, in sequence."""
    dtype = str(loop.loop_var.ty.dtype)
    numbers = [tirx.IntImm(dtype, n) for n in range(int(loop.extent))]
    return tirx.SeqStmt([with_fresh(loop.body, {loop.loop_var: n}, blocks=True) for n in numbers])


def _without_constants(realize: Any) -> Any:
    """A block without its constant variables."""
    block = realize.block
    pairs = list(zip(block.iter_vars, realize.iter_values, strict=True))
    constants = {v.var: value for v, value in pairs if isinstance(value, tirx.IntImm)}
    if not constants:
        return realize
    kept = [(v, value) for v, value in pairs if v.var not in constants]
    inner = substitute(block_with(block, iter_vars=[v for v, _ in kept]), constants)
    return s_tir.SBlockRealize([value for _, value in kept], realize.predicate, inner)


def _load(load: Any, parts: dict[Any, list[Any]]) -> Any:
    bufs = parts.get(load.source)
    return load if bufs is None else tirx.BufferLoad(bufs[int(load.indices[0])], load.indices[1:])


def _store(store: Any, parts: dict[Any, list[Any]]) -> Any:
    buffers = parts.get(store.buffer)
    if buffers is None:
        return store
    part = buffers[int(store.indices[0])]
    return tirx.BufferStore(part, store.value, store.indices[1:], store.span)


def _block(block: Any, parts: dict[Any, list[Any]]) -> Any:
    """A block that declares, reads and writes the parts."""
    allocated = [x for b in block.alloc_buffers for x in parts.get(b, [b])]
    reads, writes = (
        [y for region in regions for y in _regions(region, parts)]
        for regions in (block.reads, block.writes)
    )
    return block_with(block, alloc_buffers=allocated, reads=reads, writes=writes)


def _regions(region: Any, parts: dict[Any, list[Any]]) -> list[Any]:
    buffers = parts.get(region.source)
    if buffers is None:
        return [region]
    return [tirx.BufferRegion(part, region.region[1:]) for part in buffers]
