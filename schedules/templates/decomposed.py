"""SpMM over any format of the library, decomposed by its rules, with the default schedule.

What the search over formats tries beside the templates, which are written for one format each.
Where a pattern fills blocks, these win: a row of B that is loaded serves all rows of a block.
(SparseTIR, sections 3.2.1 and 3.3.)
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import sparse_tir as T

from sparsetir.formats import Format, Operand, Pattern, library
from sparsetir.formats.decompose import decompose_format
from sparsetir.formats.preprocess import extract_preprocess
from sparsetir.schedules.default import default_schedule, is_gpu
from sparsetir.schedules.operators.problems import Arranged, CsrPattern, Spmm
from sparsetir.schedules.templates.row_sums import row_sums, vectorize_sums
from sparsetir.schedules.templates.spmm import RowBlocks
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc

__all__ = ["Decomposed", "arrange", "program", "refusal", "schedule", "serves"]


@dataclass(frozen=True)
class Decomposed:
    """What the matrix is stored in, and how features are gone through.

    format : of the library, for matrices
    tile : features of a row that are summed up in registers at a time, 1 to 256; for formats whose
        rows come before their columns. None: the default schedule alone, for all formats and
        feature sizes
    lanes, feat : as in :class:`sparsetir.schedules.templates.spmm.RowBlocks`; only with `tile`
    filled : without masks, for patterns that fill every place of the format, such as whole blocks
    """

    format: Format
    tile: int | None = None
    lanes: int = 1
    feat: int | None = None
    filled: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format):
            raise ValueError(
                f"Decomposed: argument 'format': expected a format, got {self.format!r}"
            )
        if self.format.order not in (None, 2):
            raise ValueError(
                "Decomposed: argument 'format': expected a format of matrices, got "
                f"'{self.format.name}' of {self.format.order} axes"
            )
        if self.tile is None and (self.lanes, self.feat) != (1, None):
            raise ValueError(
                "Decomposed: argument 'tile': expected a number beside 'lanes' or 'feat', got None"
            )
        _ = self.features  # which checks the others

    @property
    def features(self) -> RowBlocks | None:
        """Where the features of a tile are; None without tiles."""
        if self.tile is None:
            return None
        return RowBlocks(tile=self.tile, lanes=self.lanes, feat=self.feat)

    @property
    def compiled(self) -> Decomposed:
        """What a kernel depends on: all of it, and no pattern."""
        return self

    def tiles(self, feat: int) -> int:
        """The argument `tiles` of the kernel; raises ScheduleError for sizes it is not made for.

        Without `tile`, each feature is one.
        """
        return feat if self.features is None else self.features.tiles(feat)


def serves(problem: Any) -> str | None:
    """What of a problem is not served; None for one that is."""
    if problem.batched:
        return "heads"
    if problem.dtype not in ("float32", "float64"):
        return f"dtype '{problem.dtype}'"
    if problem.reduce != "sum":
        return f"reduce='{problem.reduce}'"
    return None


def refusal(fmt: Format, pattern: Pattern, problem: Any, count: int | None = None) -> str | None:
    """Why a pattern is not stored in a format, if it takes too much room there.

    count : its places, where the caller knows them
    """
    count = library.places(fmt, pattern) if count is None else count
    return library.refusal(pattern, count, _operand(problem))


def program(problem: Spmm, config: Decomposed) -> SparseFunc:
    """The stage-I function: SpMM over CSR, decomposed by the format's rules, without the copies.

    b : (n, feat); out : (m, feat), written
    m, n : sizes of the matrix
    tiles : :meth:`Decomposed.tiles`; absent where the config says `feat`
    and the arguments of the format's rules, among them the values `a_<rule>`

    Raises ScheduleError for what :func:`serves` names, and for tiles of a format whose columns come
    before their rows.
    """
    _refuse("program", problem)
    rules = config.format.rules(_operand(problem))
    unmasked = [rule.name for rule in rules if rule.masked] if config.filled else []
    decomposed = decompose_format(_spmm(problem, config), rules, unmasked)
    _, func = extract_preprocess(decomposed)
    return func if config.features is None else row_sums(func, rules, config.features)


def _refuse(where: str, problem: Any) -> None:
    missing = serves(problem)
    if missing is not None:
        raise ScheduleError(
            f"decomposed.{where}: argument 'config': Decomposed serves sums of one matrix in "
            f"float32 or float64, got {missing}"
        )


def _operand(problem: Any) -> Operand:
    return Operand({"A": problem.dtype}, ("I", "J"), problem.idtype)


def _spmm(problem: Spmm, config: Decomposed) -> Any:
    """SpMM as anybody writes it."""
    dtype, it, tile = problem.dtype, problem.idtype, config.tile or 1
    size: Any = getattr(T, it)

    @T.prim_func
    def spmm(
        a: T.handle, b: T.handle, out: T.handle, indptr: T.handle, indices: T.handle,
        m: size, n: size, nnz: size, tiles: size,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, it)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), it)
        J_ = T.dense_fixed(n, it)
        K = T.dense_fixed(tiles * tile if config.feat is None else config.feat, it)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_, K), dtype)
        C = T.match_sparse_buffer(out, (I, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            with T.init():
                C[i, k] = T.cast(0, dtype)
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    if config.feat is None:
        return spmm
    return spmm.replace(params=[p for p in spmm.params if p.name != "tiles"])


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
    converted = matrix.stored_in(config.format, _operand(problem))
    masked = [part.rule.name for part in converted.parts if part.rule.masked and not part.full]
    if config.filled and masked:
        raise ScheduleError(
            f"decomposed.arrange: argument 'config': expected a pattern that fills {masked[0]}, "
            f"for filled=True, got {converted.padding:.1%} padding"
        )
    m, n = matrix.shape
    out = {**converted.arguments(config.filled), "m": int(m), "n": int(n)}
    return Arranged(out, lambda values: converted.values(A=values), converted.padding)


def schedule(
    func: tirx.PrimFunc, problem: Spmm, config: Decomposed, target: Any = None
) -> tirx.PrimFunc:
    """Schedule the stage II of :func:`program`; the function given is left as it is."""
    if config.features is None:
        return default_schedule(func, target)
    if is_gpu(target):
        raise ScheduleError(
            "decomposed.schedule: argument 'config': tiles are for CPUs; expected tile=None, got "
            f"{config.tile}"
        )
    rules = config.format.rules(_operand(problem))
    return default_schedule(vectorize_sums(func, rules), target)
