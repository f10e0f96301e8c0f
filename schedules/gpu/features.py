"""The common part of GPU templates over a dense feature axis: the mapping of features to threads.

A tile of features is spread over the threads of a row (`threadIdx.x`): each holds `coarsen` vectors
of neighbouring features, `threads` vectors apart, so that neighbouring threads read and write
vectors side by side.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx

from sparsetir.schedules.arguments import expect
from sparsetir.schedules.operators.problems import accumulator
from sparsetir.schedules.passes.parallel_loops import materialize_loop_kinds
from sparsetir.schedules.templates.register_tile import Tiled
from sparsetir.schedules.templates.shapes import RowReduction
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef, SpIter
from sparsetir.sparse_ir.tir import free_vars, loop_with
from sparsetir.sparse_ir.traversal import map_expr

VECTOR_BYTES = 16  # the widest load
MAX_BLOCKS = 32  # per multiprocessor
MAX_THREADS = 1024  # per block
MAX_OCCUPANCY = 2048  # threads per multiprocessor
MAX_ROWS = 2**31 - 1  # the most blocks of a CUDA grid, numbered in 32 bits
MAX_SUMS = 64  # accumulators per thread: more would not stay in registers
MIN_BLOCKS = "tirx.launch_bounds_min_blocks_per_sm"


class GpuTiled(Tiled):
    """A config that distributes the features of a tile over threads.

    threads : threads that share a tile
    vector : neighbouring features per load, a power of two; at most 16 bytes
    coarsen : vectors per thread, `threads` vectors apart
    feat : the feature size as a constant of the kernel, a multiple of `vector`. None: any multiple
        of `tile`, known at run time
    occupancy : the number of threads that a multiprocessor should hold, which leaves each 65536 /
        occupancy registers. None: nvcc decides, and tends to use few registers and overlap fewer
        loads
    """

    threads: int
    vector: int
    coarsen: int
    occupancy: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self, "vector", self.vector in (1, 2, 4, 8), "1, 2, 4 or 8")
        fits = self.feat is None or self.feat % self.vector == 0
        expect(self, "feat", fits, f"a multiple of vector = {self.vector}")

    def check_product(self, argument: str, most: int, *factors: str) -> None:
        """Raise ValueError if a product of fields exceeds its limit."""
        product = math.prod(getattr(self, name) for name in factors)
        wanted = f"{' * '.join(factors)} to be at most {most}"
        expect(self, argument, product <= most, wanted, product)

    @property
    def tile(self) -> int:
        """The features that `threads` threads compute in one step."""
        return self.threads * self.coarsen * self.vector

    def check_vector(self, dtype: str) -> None:
        """Raise ScheduleError for vectors wider than one load."""
        widest = VECTOR_BYTES // np.dtype(dtype).itemsize
        if self.vector > widest:
            raise ScheduleError(
                f"{type(self).__name__}: argument 'config': expected vectors of at most {widest} "
                f"{dtype}, got {self.vector}"
            )


def vector_width(feat: int, dtype: str) -> int:
    """The most neighbouring features per load: up to 16 bytes, and a divisor of the size."""
    width = VECTOR_BYTES // np.dtype(dtype).itemsize
    while feat % width:
        width //= 2
    return width


def bound_rows(sch: Schedule, rows: RowReduction) -> None:
    """Bound the number of rows by the number of blocks that a grid may have."""
    if sch.func.axis(rows.rows.name).idtype == "int64":
        sch.bound(rows.rows, MAX_ROWS, "max")


def feature_loops(
    sch: Schedule, features: SpIter, config: GpuTiled, tail: str = "shift"
) -> list[SpIter]:
    """The loops over tiles of features, a thread's vectors, threads, and the lanes of a vector.

    tail : treatment of the last tile. With "shift" it begins earlier if it would exceed the
        features, and a tile larger than all features is made smaller
    """
    threads, coarsen = config.threads, config.coarsen
    if config.feat is None:
        return sch.split(features, [None, coarsen, threads, config.vector], tail="exact")
    sch.bound(features, config.feat, "exact")
    vectors, lane = sch.split(features, [None, config.vector], tail="exact")
    if tail == "shift":
        count = config.feat // config.vector
        threads = min(threads, count)
        coarsen = min(coarsen, count // threads)
    return [*sch.split(vectors, [None, coarsen, threads], tail=tail), lane]


class RowSums(NamedTuple):
    """The iterations into which a reduction over rows is split.

    scalars, vectors : iterations whose loops over lanes become unrolled, or vectors
    reduce : the iteration over columns
    write : the iteration that writes the result
    """

    scalars: list[SparseIterationRef]
    vectors: list[SparseIterationRef]
    reduce: SparseIterationRef
    write: SparseIterationRef


def row_sums(sch: Schedule, rows: RowReduction, config: GpuTiled) -> RowSums:
    """Keep the sums of rows, and gathered operands, in registers.

    Before, and after::

        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]: ...

        with T.sp_iter([K0, I, K2], "SSS", "spmm") as [k0, i, k2]:  # tiles, rows, threads
            ...  # spmm_start over a thread's vectors, C_ws[k1, k3]
            with T.sp_iter([J], "R", "spmm_reduce") as [j]:
                ...  # B_ws_copy, spmm_reduce_rest
            ...  # spmm_write
    """
    tiles, w, threads, lane = feature_loops(sch, rows.features, config)
    lanes = [w, lane]
    order = [tiles, *rows.heads, rows.rows, threads, *rows.columns, *lanes]
    sch.sparse_reorder(rows.iteration, order)
    total = accumulator(rows.dtype)
    start, reduce, write = sch.precompute(rows.result, threads, lanes, dtype=total)
    copies, rest = gathered_vectors(sch, rows, reduce, sch.get_sp_iters(reduce)[-3])
    return RowSums([start, rest], [*copies, write], reduce, write)


def set_before(
    sch: Schedule, rows: RowReduction, config: GpuTiled, features: list[SpIter], block: int
) -> SparseIterationRef:
    """Initialise all rows before they are updated, with all threads of a block.

    features : the feature loops of the sum, which the init has as well if a tile may exceed the
        features
    block : threads per block
    """
    init = sch.get_sparse_iteration(f"{rows.iteration.name}_init")
    loops = {loop.name: loop for loop in sch.get_sp_iters(init)}
    cut = [loops.pop(f"{x.name}_all") for x in features if f"{x.name}_all" in loops]
    if not cut:
        _, last = loops.popitem()
        cut = feature_loops(sch, last, config, tail="repeat")
    batch = {x.axes for x in rows.heads}
    heads = [x for x in loops.values() if x.axes in batch]
    each = [x for x in loops.values() if x.axes not in batch]
    tiles, w, threads, lane = cut
    sch.sparse_reorder(init, [*heads, tiles, *each, threads, w, lane])
    over_blocks(sch, heads, tiles)
    sch.parallelize(each, "thread", per_block=block // config.threads)
    sch.parallelize(threads, "thread")
    return init


def over_blocks(sch: Schedule, heads: list[SpIter], tiles: SpIter) -> None:
    """Divide heads, if there are any, and tiles of features among blocks."""
    if heads:
        sch.parallelize(heads, "block")
    sch.parallelize(tiles, "block")


def gathered_vectors(
    sch: Schedule, rows: RowReduction, reduce: SparseIterationRef, loop: Any
) -> tuple[list[SparseIterationRef], SparseIterationRef]:
    """Load gathered operands as vectors; returns the copies, and the iteration that uses them.

    loop : the innermost loop over elements, or `reduce` itself, which contains it
    """
    axes = {b.name: [a.name for a in b.axes or ()] for b in sch.func.buffers}
    last = [rows.features.name]
    operands = [b for b, x in axes.items() if b != rows.result and len(x) > 1 and x[-1:] == last]
    *_, w, lane = sch.get_sp_iters(reduce)
    copies = [copy for name in operands for copy in sch.precompute(name, loop, [w, lane])]
    inside = operands and loop is not reduce
    return copies, sch.get_sparse_iteration(f"{reduce.name}_rest") if inside else reduce


def reads_of_elements(loops: Any, block: Any) -> list[int]:
    """The indices of a block's reads at the element's position, such as values and columns."""
    element = loops.get(block).iter_vars[0].var
    places = [r.region[-1].min for r in loops.get(block).reads]
    return [number for number, place in enumerate(places) if place.same_as(element)]


def _takes_one_float(block: Any) -> bool:
    """Whether a block reads a float32 that does not depend on its innermost loop."""
    lane = block.iter_vars[-1].var
    return any(
        str(read.source.dtype) == "float32"
        and not any(lane in free_vars(part.min) for part in read.region)
        for read in block.reads
    )


def in_registers(sch: Any, block: Any, vectors: bool) -> None:
    """Unroll the loops over a thread's features, or vectorise the innermost one.

    A vector with one float32 broadcast to all lanes has four: TVM prints eight equal lanes as
    `make_ulonglong4` with eight arguments, which does not compile.
    """
    *_, outer, inner = sch.get_loops(block)
    sch.unroll(outer)
    if vectors and int(sch.get(inner).extent) > 4 and _takes_one_float(sch.get(block)):
        halves, inner = sch.split(inner, [None, 4])
        sch.unroll(halves)
    if vectors:
        sch.vectorize(inner)
    else:
        sch.unroll(inner)


def occupy(sch: Schedule, config: GpuTiled, threads: int, tag: str = "threadIdx.x") -> None:
    """Tell nvcc how many blocks of `threads` threads a multiprocessor should hold.

    tag : thread tag of the loops to annotate
    """
    if config.occupancy is not None:
        blocks = config.occupancy // threads
        sch.rewrite(with_occupancy, min(max(blocks, 1), MAX_BLOCKS), tag)


def with_occupancy(func: tirx.PrimFunc, blocks: int, tag: str) -> tirx.PrimFunc:
    """A function with the number of blocks per multiprocessor, annotated at loops over `tag`."""
    number = tirx.IntImm("int32", blocks)

    def visit(loop: Any) -> Any:
        if loop.thread_binding is None or str(loop.thread_binding.thread_tag) != tag:
            return loop
        # The annotation's node is a number: TVM renews loop variables, but not those of AttrStmt.
        body = tirx.AttrStmt(number, MIN_BLOCKS, number, loop.body)
        return loop_with(loop, body=body)

    bound = materialize_loop_kinds(func)
    return bound.with_body(map_expr(bound.body, [(tirx.For, visit)]))
