"""SpMM over hyb on a GPU: one grid for buckets of rows of similar length.

(SparseTIR, section 4.2.1.) A program over CSR is decomposed into one iteration for each bucket of
each column part (`formats/hyb.py`), and each gets the form of the template for CSR: threads hold
the features of a tile in registers, see `features.py`. A bucket's rows have 2^b slots, a constant,
so that the loop over them is unrolled. A row of threads computes `work` >> b rows of bucket b in
turn, so that all have about as many elements; then all buckets are fused into one launch.

Most rows are stored whole in one bucket, and written with plain stores. Rows longer than 2^k, and
those with elements in several column parts, are stored in pieces, which are added to C atomically,
once per piece and feature (see `sparse_ir/schedule/combine_row_pieces.py`). A preceding launch sets
these, and rows without elements, to zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import s_tir, tirx

from sparsetir.formats import Hyb
from sparsetir.formats.decompose import decompose_format
from sparsetir.formats.preprocess import extract_preprocess
from sparsetir.reductions import EXTREMA, REDUCERS
from sparsetir.schedules.arguments import expect, number
from sparsetir.schedules.gpu.features import (
    GpuTiled,
    feature_loops,
    in_registers,
    occupy,
    reads_of_elements,
    row_sums,
)
from sparsetir.schedules.gpu.passes.horizontal_fuse import horizontal_fuse
from sparsetir.schedules.gpu.passes.row_loops import opaque_row_index
from sparsetir.schedules.gpu.spmm import RowSplit
from sparsetir.schedules.operators.problems import Arranged, CsrPattern, Spmm
from sparsetir.schedules.operators.spmm import program as operator
from sparsetir.schedules.passes.parallel_loops import materialize_loop_kinds, run_in_parallel
from sparsetir.schedules.template import SearchInput, Template, Tried, around, register
from sparsetir.schedules.templates.row_shapes import row_pieces
from sparsetir.schedules.templates.shapes import Nest
from sparsetir.sparse_ir.atomics import has_atomics
from sparsetir.sparse_ir.computed import COMPUTED
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.names import block_name
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.recipes.registry import RECIPES
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef
from sparsetir.sparse_ir.tir import is_one

MAX_PARTS = 120  # loop nests per kernel, whose parameters then fit into 4 KB
SLOT_VECTOR = 4  # columns or values per load


@dataclass(frozen=True)
class HybRows(GpuTiled):
    """The format, and the distribution of a bucket's rows and the features over threads.

    c, k : column parts and largest bucket of :class:`sparsetir.formats.Hyb`
    threads, vector, coarsen, feat, occupancy : see :class:`RowSplit`
    rows_per_block : rows of threads per thread block
    unroll : slots of a row whose loads are in one straight piece of code, at most
    work : the least number of slots that a row of threads computes; None: 2^k

    The last two are powers of two.
    """

    c: int = 1
    k: int = 5
    threads: int = 32
    rows_per_block: int = 4
    vector: int = 4
    coarsen: int = 1
    feat: int | None = None
    occupancy: int | None = 1024
    unroll: int = number(8, power=True)
    work: int | None = number(None, power=True, optional=True)

    def __post_init__(self) -> None:
        _ = self.format, self.split  # these check the other fields
        super().__post_init__()
        parts = self.c * (self.k + 1)
        expect(self, "c", parts <= MAX_PARTS, f"c * (k + 1) to be at most {MAX_PARTS}", parts)

    @classmethod
    def for_features(cls, feat: int, dtype: str = "float32", c: int = 1, k: int = 5) -> HybRows:
        """A configuration for a feature size, like :meth:`RowSplit.for_features`.

        Rows of a bucket are equally long, so several in a warp do not wait for each other: eight
        threads, with four vectors each, issue half the instructions for the same sectors.
        """
        split = RowSplit.for_features(feat, dtype)
        if feat % (32 * split.vector) == 0:
            return cls(c, k, 8, 16, split.vector, coarsen=4, feat=feat)
        return cls(c, k, split.threads, split.rows_per_block, split.vector, feat=feat)

    @property
    def format(self) -> Hyb:
        """The format of the matrix."""
        return Hyb(self.c, self.k)

    @property
    def split(self) -> RowSplit:
        """The distribution of a row's features over threads."""
        return RowSplit(
            self.threads, self.rows_per_block, self.vector, self.coarsen, self.feat,
            occupancy=self.occupancy,
        )  # fmt: skip

    def rows_in_turn(self, slots: int) -> int:
        """The number of rows with `slots` slots that a row of threads computes in turn."""
        return max(1, (self.work or 1 << self.k) // slots)


def shares_rows(problem: Spmm) -> bool:
    """Whether kernels add up rows that are stored in pieces.

    Maxima and minima cannot be added, and sums of 16-bit numbers would be rounded with each piece.
    """
    return problem.reduce not in EXTREMA and problem.dtype in ("float32", "float64")


def program(problem: Spmm, config: HybRows) -> SparseFunc:
    """The stage-I function: the operator, decomposed into the buckets of hyb.

    b : (n, feat); out : (m, feat), written
    row : (m,) the factors of terms, for a mean, or the initial values of rows, for a maximum: see
        :func:`sparsetir.schedules.operators.spmm.program`
    m, n, feat : sizes
    and those of the rules of :class:`Hyb`, among them the values `a_<rule>`

    Raises ScheduleError for a batch.
    """
    if problem.batched:
        raise ScheduleError("spmm_hyb.program: argument 'problem': expected no batch, got one")
    plain: Any = operator(problem)
    if COMPUTED in plain.attrs:  # they depend on `indptr`, which the buckets do not have
        plain = plain.without_attr(COMPUTED)
    _, func = extract_preprocess(decompose_format(plain, config.format.rules(problem.operand)))
    return func


def arrange(matrix: CsrPattern, problem: Spmm, config: HybRows) -> Arranged:
    """The arguments of the kernel that only depend on the pattern.

    Raises ScheduleError if rows are stored in pieces and kernels do not add them up (see
    :func:`shares_rows`): that needs one column part and 2^k of at least the longest row.
    """
    converted = matrix.stored_in(config.format, problem.operand)
    m, n = matrix.shape
    pieces = np.zeros(m, "int64")
    for part in converted.parts:
        axis = part.rule.axes_after_rewrite[1]
        rows = part.indices[part.rule.renamed(f"indices_{axis.lower()}")]
        pieces += np.bincount(rows, minlength=m)
    out: dict[str, np.ndarray | int] = {**converted.arguments(), "m": int(m), "n": int(n)}
    if not shares_rows(problem) and (pieces > 1).any():
        raise ScheduleError(
            f"spmm_hyb.arrange: argument 'config': expected one piece of each row, for a "
            f"{problem.reduce} of {problem.dtype}, got {int(pieces.max())} pieces of row "
            f"{int(pieces.argmax())} with c = {config.c}, k = {config.k}"
        )
    if of_row := REDUCERS[problem.reduce].row:
        rows = RECIPES[of_row]
        out["row"] = rows(matrix.indptr).astype(problem.accumulator)
    return Arranged(converted, out)


def apply(sch: Schedule, config: HybRows) -> None:
    """Schedule a program that is decomposed into buckets of rows, by primitives of both stages.

    Before (stage I), for each bucket, and after::

        with T.sp_iter([IO, IB, JB, K], "SSRS", "spmm_b0") as [io, ib, jb, k]: ...

        with T.sp_iter([K0, IO, IB, K1], "SSSS", "spmm_b0") as [k0, io, ib, k1]:
            ...  # as in :func:`sparsetir.schedules.gpu.features.row_sums`
            ...  # spmm_b0_write of rows in one piece, spmm_b0_write_add of the others

    Raises ScheduleError for vectors of more than 16 bytes.
    """
    pieces = row_pieces(sch, "HybRows")
    config.check_vector(pieces.first.dtype)
    parts = [row_sums(sch, part, config) for part in pieces.parts]
    shares = pieces.operator == "sum" and has_atomics("sum", pieces.first.dtype)
    writes, race = [p.write for p in parts], "atomics" if shares else "ignore"
    adds = sch.combine_row_pieces(writes, race=race, covers=pieces.covers)
    *value, write = _first(sch, pieces.first, config)
    scalars = [*value, *adds, *(x for p in parts for x in p.scalars)]
    vectors = [write, *(x for p in parts for x in p.vectors)]
    loops = sch.lower()
    if adds:
        loops = sch.rewrite(_hide, [add.block for add in adds], pieces.first.result)
    for step in scalars + vectors:
        in_registers(loops, loops.get_sblock(step.block), vectors=step in vectors)
    first = block_name(pieces.first.it.name)
    _bind(loops, first, config.rows_per_block, 1, inner=0 if value else 2)
    names = []
    for part, steps in zip(pieces.parts, parts, strict=True):
        slots = int(sch.func.axis(part.columns[0].name).nnz_cols)
        # Rows that are visited several times are updated atomically, or do not occur.
        race = "none" if sch.func.axis(part.rows.name).unique else "ignore"
        _unroll_slots(loops, steps.reduce.block, min(config.unroll, slots))
        names.append(part.iteration.block)
        _bind(loops, names[-1], config.rows_per_block, config.rows_in_turn(slots), race)
    sch.rewrite(materialize_loop_kinds)
    sch.rewrite(opaque_row_index, first, *(p.write.block for p in parts))
    sch.rewrite(horizontal_fuse, names, independent=(pieces.first.result,))
    occupy(sch, config, config.threads * config.rows_per_block)


def _first(sch: Schedule, first: Nest, config: HybRows) -> list[SparseIterationRef]:
    """The iterations that set the result's initial values, in registers unless constant."""
    ref, handles = first.handles()
    *outer, features = handles.values()
    tiles, w, threads, lane = feature_loops(sch, features, config)
    sch.sparse_reorder(ref, [tiles, *outer, threads, w, lane])
    if isinstance(first.store.value, tirx.FloatImm):
        return [ref]
    return sch.precompute(first.result, threads, [w, lane])


def _hide(func: tirx.PrimFunc, blocks: list[str], buffer: str) -> tirx.PrimFunc:
    """Hide that blocks load from a buffer, as atomic additions appear to."""
    sch = s_tir.Schedule(func)
    for name in blocks:
        block = sch.get_sblock(name)
        reads = [str(r.source.name) for r in sch.get(block).reads]
        sch.unsafe_hide_buffer_access(block, "read", [reads.index(buffer)])
    (hidden,) = sch.mod.functions.values()
    return hidden


def _unroll_slots(loops: Any, block: str, count: int) -> None:
    """Visit a row's slots several at a time, with columns and values loaded as vectors."""
    elements = loops.get_sblock(block)
    steps, straight = loops.split(loops.get_loops(elements)[0], [None, count])
    loops.unroll(straight)
    if count == 1:
        return
    for read in reads_of_elements(loops, elements):
        copy = loops.cache_read(elements, read, "local")
        loops.compute_at(copy, steps)
        vectors, lanes = loops.split(loops.get_loops(copy)[-1], [None, min(count, SLOT_VECTOR)])
        loops.unroll(vectors)
        loops.vectorize(lanes)


def _bind(
    loops: Any, block: str, rows_per_block: int, rows_in_turn: int, race: str = "none",
    inner: int = 0,
) -> None:  # fmt: skip
    """Map rows and tiles to blocks and threads.

    race : that of the rows; inner : the number of loops over a thread's features around the block
    """
    around = loops.get_loops(loops.get_sblock(block))
    tiles, *root, rows, threads = around[: len(around) - inner]
    blocks, in_turn, in_block = loops.split(rows, [None, rows_in_turn, rows_per_block])
    loops.reorder(tiles, *root, blocks, in_block, threads, in_turn)
    if not is_one(loops.get(tiles).extent):  # without this loop, a fused grid needs no division
        run_in_parallel(loops, tiles, "blockIdx.y")
    run_in_parallel(loops, blocks, "blockIdx.x", race)
    run_in_parallel(loops, in_block, "threadIdx.y", race)
    run_in_parallel(loops, threads, "threadIdx.x")


def choices(search: SearchInput) -> Tried | None:
    """The choices around the candidates; None for heads."""
    configs, shares = search.own(HybRows), shares_rows(search.problem)
    if not configs:
        return None
    k = configs[0].k
    tried, make = around(
        configs, c=(1, 2, 4) if shares else (1,), k=(max(0, k - 1), k + 1) if shares else (k,),
        rows_per_block=(2, 8), coarsen=(1, 2), unroll=(4, 8), occupancy=(None, 1024),
    )  # fmt: skip
    tried["occupancy"] = tried.pop("occupancy")  # moved to the end
    return tried, make


register(Template(HybRows, Spmm, program, apply, arrange, gpu=True, choices=choices, turn=2))
