"""SpMM over hyb on a GPU: one grid for buckets of rows of about the same length.

(SparseTIR, section 4.2.1.) A program over CSR is decomposed into one iteration for each bucket of
each column part (`formats/hyb.py`), and each is given the form of the template for CSR: threads
hold the features of a tile in registers, see `gpu_features.py`. A bucket's rows have 2^b slots, a
constant, so that the loop over them is unrolled. A row of threads goes through `work` >> b rows of
bucket b one after the other, so that all have about as many elements; then all buckets are fused
into one launch. Another launch before it sets C to zero.

Most rows are stored whole by one bucket, and written as they are. Rows longer than 2^k, and those
with elements in several column parts, are stored in pieces: `shared` tells them, and their pieces
are added to C atomically, once for each piece and feature.
"""

# The script's types are values to pyright.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import s_tir, tirx
from tvm.script import sparse_tir as T

from sparsetir.formats import Hyb, Operand
from sparsetir.formats.decompose import decompose_format, extract_preprocess
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.schedules.operators.problems import Arranged, CsrPattern, Spmm
from sparsetir.schedules.passes.horizontal_fusion import horizontal_fuse
from sparsetir.schedules.passes.parallel_loops import apply_kinds, run_in_parallel
from sparsetir.schedules.templates.feature_tiles import Tiled
from sparsetir.schedules.templates.gpu_features import (
    FeaturePlaces,
    check_target,
    check_vector,
    in_registers,
    with_occupancy,
)
from sparsetir.schedules.templates.registers import INIT, Registers
from sparsetir.schedules.templates.spmm_gpu import RowSplit
from sparsetir.sparse_ir.computed import inverse_counts
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc

__all__ = ["HybRows", "arrange", "program", "schedule", "shares_rows"]

MAX_PARTS = 120  # loop nests of a kernel, whose parameters then fit into 4 KB
SLOT_VECTOR = 4  # columns or values in a load


@dataclass(frozen=True)
class HybRows(Tiled):
    """The format, and how a bucket's rows and the features are spread over threads.

    c, k : column parts and largest bucket of :class:`sparsetir.formats.Hyb`
    threads, vector, coarsen, feat, occupancy : as in :class:`RowSplit`
    rows_per_block : rows of threads in a thread block
    unroll : slots of a row whose loads are in one straight piece of code, at most
    work : slots that a row of threads goes through, at least; None: 2^k

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
    unroll: int = 8
    work: int | None = None

    def __post_init__(self) -> None:
        _ = self.format, self.split  # which check the other fields
        for name in ("unroll", "work"):
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, int) or value < 1 or value & (value - 1)
            ):
                raise ValueError(
                    f"HybRows: argument '{name}': expected a power of two, got {value!r}"
                )
        parts = self.c * (self.k + 1)
        if parts > MAX_PARTS:
            raise ValueError(
                f"HybRows: argument 'c': expected c * (k + 1) to be at most {MAX_PARTS}, "
                f"got {parts}"
            )

    @classmethod
    def for_features(cls, feat: int, dtype: str = "float32", c: int = 1, k: int = 5) -> HybRows:
        """A configuration for a feature size, like :meth:`RowSplit.for_features`."""
        split = RowSplit.for_features(feat, dtype)
        return cls(c, k, split.threads, split.rows_per_block, split.vector, feat=feat)

    @property
    def format(self) -> Hyb:
        """What the matrix is stored in."""
        return Hyb(self.c, self.k)

    @property
    def split(self) -> RowSplit:
        """How a row's features are spread over threads."""
        return RowSplit(
            self.threads, self.rows_per_block, self.vector, self.coarsen, self.feat,
            occupancy=self.occupancy,
        )  # fmt: skip

    @property
    def compiled(self) -> HybRows:
        """What a kernel depends on: all of it."""
        return self

    @property
    def tile(self) -> int:
        """Features that the threads of a row compute."""
        return self.split.tile

    def rows_in_turn(self, bucket: int) -> int:
        """Rows of a bucket that a row of threads goes through."""
        return max(1, (self.work or 1 << self.k) >> bucket)


def shares_rows(problem: Spmm) -> bool:
    """Whether kernels add up rows that are stored in pieces.

    Maxima cannot be added, and sums of 16-bit numbers would be rounded with each piece.
    """
    return problem.reduce != "max" and problem.dtype in ("float32", "float64")


def program(problem: Spmm, config: HybRows) -> SparseFunc:
    """The stage-I function: SpMM over CSR, decomposed into the buckets of hyb.

    b : (n, feat); c : (m, feat), written
    row : (m,) what sums are multiplied with, for a mean: 1 over the number of elements; in the
        accumulator's type
    shared : (m,) int8, 1 for rows that are stored in pieces; where :func:`shares_rows`
    m, n : sizes of the matrix
    tiles : :meth:`HybRows.tiles`; absent where the config says `feat`
    and those of the rules of :class:`Hyb`, among them the values `a_<rule>`

    Raises ScheduleError for a batch and for vectors of more than 16 bytes.
    """
    if problem.batched:
        raise ScheduleError("spmm_hyb.program: argument 'problem': expected no batch, got one")
    check_vector("spmm_hyb.program", config.vector, problem.dtype)
    operand = _operand(problem)
    rules = config.format.rules(operand)
    _, func = extract_preprocess(decompose_format(_over_csr(problem, config), rules))
    return Registers(func, problem, config, shares_rows(problem)).rewrite(rules)


def _operand(problem: Spmm) -> Operand:
    return Operand({"A": problem.dtype}, ("I", "J"), problem.idtype)


def _over_csr(problem: Spmm, config: HybRows) -> Any:
    """SpMM as anybody writes it."""
    dtype, it, at = problem.dtype, problem.idtype, FeaturePlaces(config)
    size: Any = getattr(T, it)

    @T.prim_func
    def spmm(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: size, nnz: size, tiles: T.int32,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), it)
        J_ = T.dense_fixed(n, it)
        K = T.dense_fixed(at.size(tiles))
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            with T.init():
                C[i, k] = T.cast(0, dtype)
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return spmm if config.feat is None else spmm.replace(params=list(spmm.params)[:-1])


def arrange(matrix: CsrPattern, problem: Spmm, config: HybRows) -> Arranged:
    """The arguments of :func:`program` that depend on the pattern alone.

    Raises ScheduleError if rows are stored in pieces and kernels do not add them up (see
    :func:`shares_rows`): one column part and 2^k of at least the longest row are what it takes.
    """
    converted = matrix.stored_in(config.format, _operand(problem))
    m, n = matrix.shape
    pieces = np.zeros(m, "int64")
    for part in converted.parts:
        axis = part.rule.axes_after_rewrite[1]
        rows = part.indices[part.rule.renamed(f"indices_{axis.lower()}")]
        pieces += np.bincount(rows, minlength=m)
    out: dict[str, np.ndarray | int] = {**converted.arguments(), "m": int(m), "n": int(n)}
    if shares_rows(problem):
        out["shared"] = (pieces > 1).astype("int8")
    elif (pieces > 1).any():
        raise ScheduleError(
            f"spmm_hyb.arrange: argument 'config': expected one piece of each row, for a "
            f"{problem.reduce} of {problem.dtype}, got {int(pieces.max())} pieces of row "
            f"{int(pieces.argmax())} with c = {config.c}, k = {config.k}"
        )
    if problem.reduce == "mean":
        out["row"] = inverse_counts(matrix.indptr).astype(problem.accumulator)
    return Arranged(out, lambda values: converted.values(A=values), converted.padding)


def schedule(
    func: tirx.PrimFunc, problem: Spmm, config: HybRows, target: Any = None
) -> tirx.PrimFunc:
    """Schedule the stage II of :func:`program`; the function given is left as it is.

    Raises ScheduleError for a target that is no GPU.
    """
    check_target("spmm_hyb.schedule", target)
    sch = s_tir.Schedule(s_tir.renew_defs(func))
    if shares_rows(problem):
        for rule in config.format.rules(_operand(problem)):
            _hide(sch, f"share_{rule.name}0", "C")
        sch = s_tir.Schedule(sch.mod)  # which looks at dependences anew
    in_registers(sch, sch.get_sblock("zero0"), vectors=False)
    in_registers(sch, sch.get_sblock("clear0"), vectors=True)
    _bind(sch, f"{INIT}0", config.rows_per_block, 1)
    names = []
    for number, rule in enumerate(config.format.rules(_operand(problem))):
        bucket = number % (config.k + 1)
        for what in ("start", "load", "add", "finish", "share", "write"):
            if what != "share" or shares_rows(problem):
                block = sch.get_sblock(f"{what}_{rule.name}0")
                in_registers(sch, block, vectors=what in ("load", "write"))
        _unroll_slots(sch, rule, min(config.unroll, 1 << bucket))
        names.append(f"spmm_{rule.name}0")
        _bind(sch, names[-1], config.rows_per_block, config.rows_in_turn(bucket))
    (done,) = sch.mod.functions.values()
    fused = horizontal_fuse(apply_kinds(done), names, independent=("C",))
    return with_occupancy(fused, config)


def _hide(sch: Any, block: str, buffer: str) -> None:
    """Hide that a block loads from a buffer, as atomic additions seem to."""
    found = sch.get_sblock(block)
    names = [str(r.source.name) for r in sch.get(found).reads]
    sch.unsafe_hide_buffer_access(found, "read", [names.index(buffer)])


def _unroll_slots(sch: Any, rule: FormatRewriteRule, count: int) -> None:
    """Go through a row's slots some at a time, whose columns and values are loaded as vectors."""
    elements = sch.get_sblock(f"elements_{rule.name}0")
    (slots,) = sch.get_loops(elements)
    steps, straight = sch.split(slots, [None, count])
    sch.unroll(straight)
    if count == 1:
        return
    columns = f"{rule.renamed(rule.axes_after_rewrite[-1])}_indices"
    for buffer in (columns, rule.renamed("A")):
        reads = [str(r.source.name) for r in sch.get(elements).reads]
        copy = sch.cache_read(elements, reads.index(buffer), "local")
        sch.compute_at(copy, steps)
        vectors, lanes = sch.split(sch.get_loops(copy)[-1], [None, min(count, SLOT_VECTOR)])
        sch.unroll(vectors)
        sch.vectorize(lanes)


def _bind(sch: Any, block: str, rows_per_block: int, rows_in_turn: int) -> None:
    """Spread rows and tiles over blocks and threads."""
    tiles, *root, rows, threads = sch.get_loops(sch.get_sblock(block))
    blocks, in_turn, in_block = sch.split(rows, [None, rows_in_turn, rows_per_block])
    sch.reorder(tiles, *root, blocks, in_block, threads, in_turn)
    # Rows stored in pieces meet by atomic additions; the others have one piece, by the format.
    if not _is_one(sch.get(tiles).extent):  # without it, a fused grid takes no division
        run_in_parallel(sch, tiles, "blockIdx.y", "ignore")
    run_in_parallel(sch, blocks, "blockIdx.x", "ignore")
    run_in_parallel(sch, in_block, "threadIdx.y", "ignore")
    run_in_parallel(sch, threads, "threadIdx.x", "ignore")


def _is_one(extent: Any) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1
