"""SpMM over any format of the library, decomposed by its rules.

What the search over formats tries beside the templates, which are written for one format each.
Where a pattern fills blocks, these win: a row of B that is loaded serves all rows of a block.
(SparseTIR, sections 3.2.1 and 3.3.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from sparsetir.formats import BSR, DBSR, Format, Operand, Pattern, library
from sparsetir.formats.decompose import decompose_format
from sparsetir.formats.format import REGISTRY
from sparsetir.formats.preprocess import extract_preprocess
from sparsetir.schedules.arguments import expect, number
from sparsetir.schedules.operators.problems import (
    Arranged,
    CsrPattern,
    Spmm,
    accumulator,
    vector_lanes,
)
from sparsetir.schedules.operators.spmm import program as spmm
from sparsetir.schedules.registers import feature_tile, served, sum_vectors
from sparsetir.schedules.targets import is_gpu, vector_bits
from sparsetir.schedules.template import Asked, Template, Tried, register
from sparsetir.schedules.templates import register_tile
from sparsetir.schedules.templates.register_tile import Straight
from sparsetir.schedules.templates.row_shapes import row_sums
from sparsetir.schedules.templates.sums_apart import adds_once, sums_apart
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc, sparse_iterations
from sparsetir.sparse_ir.schedule import Schedule


@dataclass(frozen=True)
class Decomposed(register_tile.RegisterTile):
    """What the matrix is stored in, and how features are gone through.

    format : of the library, for matrices
    tile : features of a row that are summed up in registers at a time, 1 to 256; for formats whose
        rows come before their columns. None: the default schedule alone, for all formats and
        feature sizes
    filled : without masks, for patterns that fill every place of the format, such as whole blocks
    lanes, feat : as of :class:`RegisterTile`; only with `tile`
    """

    format: Format
    tile: int | None = number(None, most=register_tile.MAX_TILE, optional=True)
    lanes: int = 1
    feat: int | None = None
    filled: bool = False

    def __post_init__(self) -> None:
        expect(self, "format", isinstance(self.format, Format), "a format")
        if self.format.order not in (None, 2):
            raise ValueError(
                "Decomposed: argument 'format': expected a format of matrices, got "
                f"'{self.format.name}' of {self.format.order} axes"
            )
        alone = (self.lanes, self.feat) == (1, None)
        expect(self, "tile", self.tile is not None or alone, "a number beside 'lanes' or 'feat'")
        if self.tile is not None:
            super().__post_init__()

    def tiles(self, feat: int) -> int:
        """The argument `tiles` of the kernel; raises ScheduleError for sizes it is not made for.

        Without `tile`, each feature is one.
        """
        return feat if self.tile is None else super().tiles(feat)


def serves(problem: Any) -> str | None:
    """What of a problem is not served; None for one that is."""
    if problem.batched:
        return "heads"
    if problem.reduce != "sum":
        return f"reduce='{problem.reduce}'"
    return None


def refusal(fmt: Format, pattern: Pattern, problem: Any, count: int | None = None) -> str | None:
    """Why a pattern is not stored in a format, if it takes too much room there.

    count : its places, where the caller knows them
    """
    count = fmt.places(pattern) if count is None else count
    return library.refusal(pattern, count, problem.operand)


def program(problem: Spmm, config: Decomposed) -> SparseFunc:
    """The stage-I function: SpMM over CSR, decomposed by the format's rules, without the copies.

    b : (n, feat); out : (m, feat), written
    m, n, feat : sizes
    and the arguments of the format's rules, among them the values `a_<rule>`

    Sums are in float32 (float64 for float64), and rounded once: what several iterations add to, or
    the default schedule makes, is summed up in an array of that type.

    Raises ScheduleError for what :func:`serves` names.
    """
    _refuse("program", problem)
    rules = config.format.rules(problem.operand)
    unmasked = [rule.name for rule in rules if rule.masked] if config.filled else []
    _, func = extract_preprocess(decompose_format(spmm(problem), rules, unmasked))
    narrow = problem.accumulator != (problem.out or problem.dtype)
    if narrow and (config.tile is None or not adds_once(func)):
        return sums_apart(func, "C", problem.accumulator)
    return func


def apply(sch: Schedule, config: Decomposed) -> None:
    """Schedule a program that sums over what rows store in any format (CPU, with tiles alone).

    Before (stage I), such as of BSR, and after::

        with T.sp_iter([IO, JO, II, JI, K], "SRSRS", "spmm_bsr") as [io, jo, ii, ji, k]: ...

        with T.sp_iter([IO, K0], "SS", "spmm_bsr") as [io, k0]:
            with T.sp_iter([II, K1, K2], "SSS", "spmm_bsr_start") as [ii, k1, k2]: ...
            with T.sp_iter([JO, JI, II, K1, K2], "RRSSS", "spmm_bsr_reduce") as [...]: ...
            with T.sp_iter([II, K1, K2], "SSS", "spmm_bsr_write") as [ii, k1, k2]: ...

    Rows that are stored in pieces, or by several rules, are set first, and sums added to them.
    Without `tile` the default schedule follows.

    Raises ScheduleError for a program whose columns come before their rows, as over CSC.
    """
    if config.tile is None:
        return
    registers: Straight = []
    for found in sorted(row_sums(sch, "Decomposed"), key=lambda found: not found.columns):
        if found.iteration.name not in {it.name for it in sparse_iterations(sch.func)}:
            continue  # set where sums begin
        if found.columns:
            dtype = accumulator(sch.func.buffer(found.result).dtype)
            rows, columns = found.rows, found.columns
            steps = register_tile.in_registers(
                sch, found, config, rows, columns, held=found.block, dtype=dtype
            )
        else:
            tiles, vectors = register_tile.in_tiles(sch, found.features, config)
            held = [*found.block, *vectors]
            sch.sparse_reorder(found.iteration, [*found.rows, tiles, *held])
            steps = [(found.iteration, len(held))]
        if found.threads is not None:
            sch.parallelize(found.threads)
        if found.constant and sch.func.buffer(found.result).dtype == "bfloat16":
            continue  # TVM has no constant vectors of it; LLVM makes vectors of the loop
        registers += steps
    register_tile.straight_code(sch, registers)


def _refuse(where: str, problem: Any) -> None:
    missing = serves(problem)
    if missing is not None:
        raise ScheduleError(
            f"decomposed.{where}: argument 'config': Decomposed serves sums of one matrix, got "
            f"{missing}"
        )


def arrange(matrix: CsrPattern, problem: Spmm, config: Decomposed) -> Arranged:
    """The arguments of :func:`program` that depend on the pattern alone.

    Raises ScheduleError for a pattern that takes too much room in the format.
    """
    _refuse("arrange", problem)
    too_much = refusal(config.format, matrix.coordinates, problem)
    if too_much is not None:
        raise ScheduleError(
            f"decomposed.arrange: argument 'config': {config.format.name} takes too much room for "
            f"the pattern: {too_much}"
        )
    converted = matrix.stored_in(config.format, problem.operand)
    masked = [part.rule.name for part in converted.parts if part.rule.masked and not part.full]
    if config.filled and masked:
        raise ScheduleError(
            f"decomposed.arrange: argument 'config': expected a pattern that fills {masked[0]}, "
            f"for filled=True, got {converted.padding:.1%} padding"
        )
    m, n = matrix.shape
    out = {**converted.arguments(config.filled), "m": int(m), "n": int(n)}
    return Arranged(converted, out)


def is_full(fmt: Format, pattern: Pattern, count: int | None = None) -> bool:
    """Whether a format that pads has no padding for a pattern, so that it needs no masks.

    count : its places, where the caller knows them
    """
    if not traits_of(fmt).masked:
        return False
    if isinstance(fmt, BSR | DBSR) and (pattern.shape[0] % fmt.rows or pattern.shape[1] % fmt.cols):
        return False
    return (fmt.places(pattern) if count is None else count) == pattern.nnz


class Traits(NamedTuple):
    """What tiles depend on.

    masked : whether padding is told from elements by a mask
    rows_first : whether rows come before what they store
    rows : of a block
    """

    masked: bool
    rows_first: bool
    rows: int


@cache
def traits_of(fmt: Format) -> Traits:
    """What tiles of a format's program depend on."""
    masked = any(rule.masked for rule in fmt.rules(Operand.default(2)))
    sch = Schedule(program(Spmm(), Decomposed(fmt)))
    try:
        found = row_sums(sch, "space")
    except ScheduleError:
        return Traits(masked, False, 1)
    return Traits(masked, True, max(one.block_rows for one in found))


def choices(asked: Asked) -> Tried | None:
    """The formats of the library that do not pad the pattern too much, by name.

    tile : features; 0 for the default schedule alone, as all others are where the format's rows
        come after its columns
    """
    problem, stored, feat = asked.problem, asked.pattern.coordinates, asked.given.feat
    if serves(problem) is not None:
        return None
    lanes, most = 0, 0  # of a vector, and vectors of sums that stay in registers: none on GPUs
    if not is_gpu(asked.target):
        bits = vector_bits(asked.target)
        lanes, most = feature_tile(feat, vector_lanes(problem, bits), 1).lanes, sum_vectors(bits)
    found, filled = {}, set()
    counts: dict[Any, int] = {}  # DBSR has the places of BSR
    for fmt in (f for entry in REGISTRY.values() for f in entry.search(stored)):
        key = (fmt.rows, fmt.cols) if isinstance(fmt, BSR | DBSR) else fmt
        if key not in counts:
            counts[key] = fmt.places(stored)
        if refusal(fmt, stored, problem, counts[key]) is None:
            found[fmt.name] = fmt
            if is_full(fmt, stored, counts[key]):
                filled.add(fmt.name)

    def make(format: str, tile: int) -> Decomposed:
        fmt, traits = found[format], traits_of(found[format])
        full = format in filled
        tile = min(tile, max(1, most // traits.rows) * lanes)
        if not tile or not traits.rows_first:
            return Decomposed(fmt, filled=full)
        return Decomposed(fmt, tile, lanes, served(feat, tile, lanes), full)

    tiles = {min(feat, v * lanes) for v in (2, 8) if lanes > 1}
    return {"format": tuple(found), "tile": (0, *sorted(tiles))}, make


register(Template(Decomposed, Spmm, program, apply, arrange, gpu=None, choices=choices, turn=5))
