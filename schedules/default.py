"""The schedule of a program whose author gives none.

CPU: the outermost loop that is free of races runs in parallel, in parts of about equal work if
rows differ in length; the innermost contiguous one is vectorised, with a scalar loop for the
remainder; exp, tanh and sigmoid of float32 become polynomials, which vectorise
(:mod:`sparsetir.schedules.passes.inline_exponentials` gives their error). GPU: loops free of races
become blocks and threads; a nest without such loops runs on one thread. Correct for every program,
and a starting point for fast ones.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.tirx.buffer import buffer_data

from sparsetir.schedules.passes.equal_work import EQUAL_WORK
from sparsetir.schedules.passes.inline_exponentials import inline_exponentials
from sparsetir.schedules.passes.launches import binds_threads, top_level
from sparsetir.schedules.passes.parallel_loops import (
    is_free,
    materialize_loop_kinds,
    run_in_parallel,
    thread_axis,
)
from sparsetir.schedules.passes.shared_visits import shared_visits
from sparsetir.schedules.passes.vectorize_innermost import (
    ANY_SIZE,
    SizeRange,
    size_of_tiles,
    tile_sizes,
    vectorize_innermost,
)
from sparsetir.schedules.passes.vectorize_reductions import vectorize_reductions
from sparsetir.schedules.passes.versions import Versions, joined
from sparsetir.schedules.registers import sum_vectors
from sparsetir.schedules.targets import is_gpu, l2_bytes, vector_registers
from sparsetir.sparse_ir.annotations import THREADS
from sparsetir.sparse_ir.hoist_init import hoist_init
from sparsetir.sparse_ir.nodes import buffer_var, nodes_of, stores_of, substitute
from sparsetir.sparse_ir.tir import as_one, block_with, is_one, loop_over
from sparsetir.sparse_ir.workers import KIND

GPU_THREADS = 128
GPU_WARP = 32
FEW_LANES = 8  # 32 bytes, the granularity of memory accesses


def default_schedule(
    func: tirx.PrimFunc, target: Any, vectors: int | None = None, any_order: bool = False
) -> tirx.PrimFunc:
    """Schedule a stage-II function for a target; `func` is not modified.

    Parameters
    ----------
    func : PrimFunc
        From :func:`lower_sparse_iter`.
    target : tvm.target.Target
        "cuda", "opencl" and the like are GPUs, all others CPUs.
    vectors : int, optional
        Accumulator vectors of the widest register tile on a CPU; by default as many as fit.
    any_order : bool
        On CPUs, also vectorise products over a size, which reorders their sums.

    Returns
    -------
    PrimFunc
    """
    func = s_tir.renew_defs(func)
    if is_gpu(target):
        return on_one_thread(bind_to_threads(func))
    return joined(versions_by_size(func, target, vectors, any_order))


def versions_by_size(
    func: tirx.PrimFunc, target: Any, vectors: int | None = None, any_order: bool = False
) -> Versions:
    """Versions of a stage-II function for a CPU, by the size of its innermost loops.

    vectors, any_order : see :func:`default_schedule`; a given `vectors` leads to one version
    """
    bits, registers = vector_registers(target)
    scheduled, most = _cpu(func), vectors or sum_vectors(registers)
    tiled = size_of_tiles(scheduled, bits, most) if vectors is None else None
    if tiled is None:
        return Versions(None, [("all", 0, _in_vectors(scheduled, bits, most, any_order))])
    size, width = tiled
    index = list(scheduled.params).index(size)
    ends = tile_sizes(width)
    versions: list[tuple[str, int, tirx.PrimFunc]] = []
    for low, high in zip([-1, *ends], [*ends, None], strict=True):
        func = s_tir.renew_defs(scheduled)
        among = SizeRange(func.params[index], low + 1, high)
        name = f"above_{low}" if high is None else f"up_to_{high}"
        versions.append((name, high or 0, _in_vectors(func, bits, most, any_order, among)))
    return Versions(index, versions)


def _in_vectors(
    func: tirx.PrimFunc, bits: int, vectors: int, any_order: bool, among: SizeRange = ANY_SIZE
) -> tirx.PrimFunc:
    """Vectorise the innermost loops of a CPU function, for a range of sizes."""
    scheduled = vectorize_innermost(func, bits, l2_bytes(), vectors, among)
    # Reductions whose init was outside become updates once inits are separate statements.
    scheduled = vectorize_innermost(
        hoist_init(scheduled), bits, l2_bytes(), vectors, among, sums_alone=True
    )
    return inline_exponentials(vectorize_reductions(scheduled, bits, l2_bytes(), any_order))


def _top_blocks(sch: Any) -> list[Any]:
    return list(sch.get_child_blocks(sch.get_sblock("root")))


def _cpu(func: tirx.PrimFunc) -> tirx.PrimFunc:
    sch = s_tir.Schedule(shared_visits(func))
    for block in _top_blocks(sch):
        loops = sch.get_loops(block)
        if THREADS in sch.get(block).annotations or loops and _is_divided(sch.get(loops[0])):
            continue  # stage I has mapped it to threads
        outermost = next((n for n, lp in enumerate(loops) if not is_one(sch.get(lp).extent)), 0)
        if loops and _is_open(sch, loops[outermost], threads=False):
            run_in_parallel(sch, loops[outermost], "parallel")
            sch.annotate(loops[outermost], EQUAL_WORK, True)
    return materialize_loop_kinds(_only(sch.mod))


def _is_divided(nest: Any) -> bool:
    """Whether a nest already has a parallel loop; threads do not nest."""
    return any(loop.kind == tirx.ForKind.PARALLEL for loop in nodes_of(tirx.For, nest))


def _is_bound(nest: Any) -> bool:
    """Whether a loop of a nest is bound to blocks or threads."""
    loops = nodes_of(tirx.For, nest)
    return any(
        x.thread_binding is not None or "Idx" in str(x.annotations.get(KIND, "")) for x in loops
    )


def _is_open(sch: Any, loop: Any, threads: bool = True) -> bool:
    """Whether a loop is free of races, and stage I has not mapped it."""
    return KIND not in sch.get(loop).annotations and is_free(sch, loop, threads)


def _only(mod: tvm.IRModule) -> Any:
    return next(iter(mod.functions.values()))


def bind_to_threads(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Bind loops of a stage-II function that are free of races, in nests without bound loops."""
    sch = s_tir.Schedule(func)
    for top in _top_blocks(sch):
        loops = sch.get_loops(top)
        if loops and _is_bound(sch.get(loops[0])):
            continue  # stage I has mapped it to threads
        free = [n for n, loop in enumerate(loops) if _is_open(sch, loop)]
        free = [n for n in free if not is_one(sch.get(loops[n]).extent)] or free[:1]
        mixed = _is_mixed(sch.get(top))
        if mixed:
            free = free[:1] if 0 in free else []  # no loop can be moved outside
        leaf = _only_leaf(sch, top)
        inner = _thread_loop(sch, leaf) if leaf is not None else None
        if not loops or not (free or inner):
            continue
        if not free:
            # No outer loop is free of races: one block, its threads share the innermost loop.
            run_in_parallel(sch, sch.add_unit_loop(top), "blockIdx.x")
            _bind_threads(sch, leaf, inner, GPU_THREADS)
            continue
        chosen = [loops[n] for n in free]
        rest = [] if mixed else [loops[n] for n in range(len(loops)) if n not in free]
        # Loops are not fused: the product of two sizes could overflow their type.
        first, last, pair = chosen[0], chosen[-1], ()
        if inner is not None:
            blocks, threads = sch.split(first, [None, GPU_THREADS // GPU_WARP])
            run_in_parallel(sch, threads, "threadIdx.y")
            chosen = [blocks, threads, *chosen[1:]]
            _bind_threads(sch, leaf, inner, GPU_WARP)
        elif len(chosen) == 1:
            blocks, threads = sch.split(first, [None, GPU_THREADS])
            run_in_parallel(sch, threads, "threadIdx.x")
            chosen = [blocks, threads]
        else:
            lanes = 1 if is_one(sch.get(loops[-1]).extent) else _lanes(sch.get(last).extent)
            blocks, rows = sch.split(first, [None, GPU_THREADS // lanes])
            steps, threads = sch.split(last, [None, lanes])
            pair, chosen = (rows, threads), [blocks, rows, threads, steps, *chosen[1:-1]]
        if rest or len(chosen) > 3:
            sch.reorder(*chosen, *rest)
        run_in_parallel(sch, blocks, "blockIdx.x")
        if pair:  # both are free of races
            run_in_parallel(sch, sch.fuse(*pair), "threadIdx.x", "ignore")
    return materialize_loop_kinds(_only(sch.mod))


def _is_mixed(block: Any) -> bool:
    """Whether a loop of the block is over spatial and reduction axes at once."""
    kinds = (tirx.IterVar.DataPar, tirx.IterVar.CommReduce)
    return any(v.iter_type not in kinds for v in block.iter_vars)


def _only_leaf(sch: Any, top: Any) -> Any:
    """The only computing block inside `top`, if there is just one below a block boundary."""
    block = top
    while True:
        children = [b for b in sch.get_child_blocks(block) if not _is_search(sch.get(b))]
        if not children:
            return None if block is top else block
        if len(children) > 1 or sch.get(block).init is not None or _stores(sch.get(block).body):
            return None
        block = children[0]


def _stores(body: Any) -> bool:
    """Whether a block's body stores, other than in nested blocks."""
    inside = stores_of(*nodes_of(s_tir.SBlock, body, nested=False))
    return len(stores_of(body)) > len(inside)


def _is_search(block: Any) -> bool:
    return all(w.source.ty.storage_scope == "local" for w in block.writes)


def _thread_loop(sch: Any, leaf: Any) -> Any:
    return next((lp for lp in reversed(sch.get_loops(leaf)) if _is_open(sch, lp)), None)


def _lanes(extent: Any) -> int:
    """The number of neighbouring threads for a loop: no more than its extent, if constant."""
    constant = isinstance(extent, tirx.IntImm)
    return min(GPU_WARP, 1 << (int(extent) - 1).bit_length()) if constant else FEW_LANES


def _bind_threads(sch: Any, leaf: Any, loop: Any, threads: int) -> None:
    loops = sch.get_loops(leaf)
    place = next(n for n, lp in enumerate(loops) if sch.get(lp).same_as(sch.get(loop)))
    others = [lp for n, lp in enumerate(loops) if n != place]
    outer, inner = sch.split(loop, [None, threads])
    if others and not _is_mixed(sch.get(leaf)):
        sch.reorder(outer, inner, *others)
    run_in_parallel(sch, inner, "threadIdx.x")


def on_one_thread(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Run each top-level statement that has no threads on a single one.

    Buffers allocated outside of kernels are in memory, even if their scope is "local".
    """
    held = [v for v in func.body.block.alloc_buffers if v.ty.storage_scope == "local"]
    memory = {v: buffer_var(v.ty.shape, v.ty.dtype, v.name) for v in held}
    func = func.with_body(substitute(func.body, memory))
    root = func.body.block
    parts = [p for p in top_level(func) if not isinstance(p, tirx.Evaluate)]  # those below
    # An address keeps a buffer's allocation on the host, even if only one kernel uses it.
    body: list[tirx.Stmt] = [tirx.Evaluate(buffer_data(v)) for v in root.alloc_buffers]
    body += [p if binds_threads(p) else _single_thread(p) for p in parts]
    block = block_with(root, body=as_one(body))
    return func.with_body(s_tir.SBlockRealize([], True, block))


def _single_thread(stmt: tirx.Stmt) -> tirx.Stmt:
    for tag in ("threadIdx.x", "blockIdx.x"):
        loop = tirx.Var(tag.replace(".", "_"), "int32")
        stmt = loop_over(loop, 1, stmt, tirx.ForKind.THREAD_BINDING, thread_axis(tag))
    return stmt
