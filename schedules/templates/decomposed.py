"""SpMM over any format of the library, decomposed by its rules, under the default schedule.

The search over formats tries these besides the templates, each of which is written for one format.
(SparseTIR, sections 3.2.1 and 3.3.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx

from sparsetir.formats import BSR, DBSR, Format, Operand, Pattern, library
from sparsetir.formats.decompose import decompose_format
from sparsetir.formats.format import REGISTRY
from sparsetir.formats.preprocess import extract_preprocess, statements
from sparsetir.schedules.arguments import Config, expect
from sparsetir.schedules.operators.problems import (
    Arranged,
    CsrPattern,
    Spmm,
    refuse_unsupported,
    unsupported,
)
from sparsetir.schedules.operators.spmm import program as spmm
from sparsetir.schedules.passes.normal_form import normal_form
from sparsetir.schedules.template import SearchInput, Template, Tried, register
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import (
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
    sparse_iterations,
    substitute,
)
from sparsetir.sparse_ir.schedule import Schedule


@dataclass(frozen=True)
class Decomposed(Config):
    """The format in which a matrix is stored; the default schedule does the rest.

    format : a format of the library, for matrices
    filled : without masks, for patterns that fill every place of the format, such as whole blocks
        within the matrix
    """

    format: Format
    filled: bool = False

    def __post_init__(self) -> None:
        expect(self, "format", isinstance(self.format, Format), "a format")
        if self.format.order not in (None, 2):
            raise ValueError(
                "Decomposed: argument 'format': expected a format of matrices, got "
                f"'{self.format.name}' of {self.format.order} axes"
            )

    def tiles(self, feat: int) -> int:
        """The argument `tiles` of the kernel: each feature is one."""
        return feat


def refusal(fmt: Format, pattern: Pattern, problem: Any, count: int | None = None) -> str | None:
    """Why a format that takes too much space for a pattern is refused, or None.

    count : its number of places, if the caller knows it
    """
    count = fmt.places(pattern) if count is None else count
    return library.refusal(pattern, count, problem.operand)


def program(problem: Spmm, config: Decomposed) -> SparseFunc:
    """The stage-I function: SpMM over CSR, decomposed by the format's rules, without the copies.

    b : (n, feat); out : (m, feat), written
    m, n, feat : sizes
    and the arguments of the format's rules, among them the values `a_<rule>`

    If blocks are filled, m and n are promised to be multiples of their sizes.

    Sums are float32 (float64 for float64), and rounded once: a result that several iterations
    update is accumulated in an array of that type.

    Raises ScheduleError for other problems than sums of one matrix.
    """
    refuse_unsupported("decomposed.program", config, problem)
    func = in_format(problem, config.format, config.filled)
    narrow = problem.accumulator != (problem.out or problem.dtype)
    if narrow and not sums_in_one_iteration(normal_form(func)):
        wide = replace(problem, out=problem.accumulator)
        func = rounded(in_format(wide, config.format, config.filled), "C", problem.dtype)
    sizes = zip("mn", _block_shape(config.format), strict=True) if config.filled else ()
    promises = [{"param": p, "kind": "multiple", "value": v} for p, v in sizes if v > 1]
    return func.with_attr("promises", promises) if promises else func


def in_format(problem: Spmm, fmt: Format, filled: bool) -> SparseFunc:
    """SpMM over CSR, decomposed by the rules of a format, without the copies.

    filled : without masks
    """
    rules = fmt.rules(problem.operand)
    unmasked = [rule.name for rule in rules if rule.masked] if filled else []
    return extract_preprocess(decompose_format(spmm(problem), rules, unmasked))[1]


def sums_in_one_iteration(func: SparseFunc) -> bool:
    """Whether a single iteration computes sums, each row in one piece with its features inside.

    Then registers of the default schedule hold all terms of an element in a wider type, and nothing
    is rounded before the last one. Rows of a block, inside its columns, are accumulated in memory.
    """
    sums = [it for it in sparse_iterations(func) if "R" in it.kinds]
    if len(sums) != 1 or not re.fullmatch("S+R+S", sums[0].kinds):
        return False
    kind_of = {axis.name: kind for axis, _, kind in sums[0].axis_of()}
    rows = [axis for axis, _, kind in sums[0].axis_of() if kind == "S"]
    above = [a.name for axis in rows for a in axis.ancestors()[:-1]]
    return all(axis.unique for axis in rows) and all(kind_of.get(a) != "R" for a in above)


def rounded(func: SparseFunc, result: str, dtype: str) -> SparseFunc:
    """A function with a separate array for its result, which it rounds to another type once.

    Before::

        with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]:
            C[i, k] = T.float32(0.0)
        with T.sp_iter([O, IR, JC, K], "SSRS", "spmm_row_ell_4") as [o, ir, jc, k]:
            C[ir, k] = C[ir, k] + ...

    After `rounded(func, "C", "float16")`::

        C_sum = T.alloc_sparse_buffer((I, K), "float32")
        ...  # of C_sum instead of C
        with T.sp_iter([I, K], "SS", "C_round") as [i, k]:
            C[i, k] = T.Cast("float16", C_sum[i, k])
    """
    wide = func.buffer(result)
    axes = list(wide.axes or ())
    lengths = [axis.length for axis in axes]
    sums = buffer_var(lengths, wide.dtype, f"{result}_sum")
    narrow = SparseBuffer(buffer_var(lengths, dtype, result), axes, wide.handle)
    point: list[Any] = [tirx.Var(str(a.name).lower(), a.idtype) for a in axes]
    value = tirx.Cast(dtype, tirx.BufferLoad(sums, point))
    last = SparseIteration(
        span=None, axes=axes, kinds="S" * len(axes), name=f"{result}_round", vars=point, init=None,
        body=tirx.BufferStore(narrow.var, value, point), annotations={}
    )  # fmt: skip
    buffers = [narrow if b.var.same_as(wide.var) else b for b in func.buffers]
    return func.replace(
        buffers=[*buffers, SparseBuffer(sums, axes, None)],
        body=tirx.SeqStmt([*statements(substitute(func, {wide.var: sums})), last]),
    )


def _block_shape(fmt: Format) -> tuple[int, int]:
    """Rows and columns of a block of BSR or DBSR; (1, 1) for other formats."""
    return (fmt.rows, fmt.cols) if isinstance(fmt, BSR | DBSR) else (1, 1)


def _overhangs(fmt: Format, shape: tuple[int, ...]) -> bool:
    """Whether the last blocks of a format exceed a matrix."""
    return any(n % b for n, b in zip(shape, _block_shape(fmt), strict=True))


def apply(sch: Schedule, config: Decomposed) -> None:
    """Leave a program unchanged, for the default schedule."""


def arrange(matrix: CsrPattern, problem: Spmm, config: Decomposed) -> Arranged:
    """The arguments of :func:`program` that only depend on the pattern.

    Raises ScheduleError for a pattern that takes too much space in the format.
    """
    refuse_unsupported("decomposed.arrange", config, problem)
    if config.filled and _overhangs(config.format, matrix.shape):
        raise ScheduleError(
            "decomposed.arrange: argument 'config': expected a shape that blocks of "
            f"{_block_shape(config.format)} divide, for filled=True, got {tuple(matrix.shape)}"
        )
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
    """Whether a padding format has no padding for a pattern, so that it needs no masks.

    count : its number of places, if the caller knows it
    """
    if not any(rule.masked for rule in fmt.rules(Operand.default(2))):
        return False
    if _overhangs(fmt, pattern.shape):
        return False
    return (fmt.places(pattern) if count is None else count) == pattern.nnz


def choices(search: SearchInput) -> Tried | None:
    """The formats of the library that do not pad the pattern too much, by name."""
    problem, stored = search.problem, search.pattern.coordinates
    if unsupported(problem) is not None:
        return None
    configs: dict[str, Decomposed] = {}
    counts: dict[Any, int] = {}  # DBSR has the places of BSR
    for fmt in (f for entry in REGISTRY.values() for f in entry.search(stored)):
        key = (fmt.rows, fmt.cols) if isinstance(fmt, BSR | DBSR) else fmt
        if key not in counts:
            counts[key] = fmt.places(stored)
        if refusal(fmt, stored, problem, counts[key]) is None:
            configs[fmt.name] = Decomposed(fmt, is_full(fmt, stored, counts[key]))

    def make(format: str) -> Decomposed:
        return configs[format]

    return {"format": tuple(configs)}, make


register(Template(Decomposed, Spmm, program, apply, arrange, gpu=None, choices=choices, turn=5))
