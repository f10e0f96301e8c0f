"""The stage-I program of a region, as text, and its kernel.

A region computes an expression for each edge, and reduces it at the nodes of one of the edges'
indices, or stores it. Loops over features are inside those over edges. One program, and one kernel,
serves any number of nodes and edges; it serves one number of features if that is a multiple of
vectors or small, else any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tvm.error import DiagnosticError

from sparsetir.graph import ahead
from sparsetir.planning.run_plan import compiled
from sparsetir.records.task import Config
from sparsetir.runtime.file_errors import first_line
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.kernel_cache import is_kept
from sparsetir.runtime.pipeline import Stages, lower
from sparsetir.schedules.search import program_space
from sparsetir.schedules.targets import resolve_target
from sparsetir.sparse_ir.script.parser import from_source
from sparsetir.sparse_ir.script.writer import Writer, cast, reduced

NAME = "region"
parsed = lru_cache(512)(from_source)
GIVEN = -1  # the caller's order of edges


@dataclass(frozen=True)
class Operand:
    """A tensor as it is read at an edge.

    at : index of the first dimension: "row", the node at which the region reduces; "other", a node
        by another index; "edge"; or "all", a tensor without it, the same for all edges
    number : for "other" which of the other indices; for "edge" the index by which the values are
        sorted, 0 for that of the rows, or `GIVEN`
    axes : for each further dimension its loop over features; None for dimensions of size 1, which
        have no loop; -n for the n numbers that a product sums over
    dtype : its type in memory
    times : the operand, a vector, that this small matrix is multiplied by
    """

    at: str
    number: int
    axes: tuple[int | None, ...]
    dtype: str = "float32"
    times: int | None = None


@dataclass(frozen=True)
class Program:
    """A region's expression and its reduction: all that its kernel depends on.

    expression : text for an edge, in stage I, with {n} for the value read from operand n or, if it
        is a matrix, its product, and {numbers} for the type of constants, that of the computation
    operands : by number
    result : axes of the result, like those of operands
    loops : the size of each loop over features that the kernel is compiled for, None for any size
    others : number of indices besides that of the rows
    reduce : reduction at nodes, "sum", "max" or "min"; None for edge values
    summed : number of the last loops that edge values are summed over
    short : whether features are so few that each loops over the edges of a row
    dtype : type of the computation and its sums: operands are cast to it as they are read
    stored : type of the result, which is rounded once
    """

    expression: str
    operands: tuple[Operand, ...]
    result: tuple[int | None, ...]
    loops: tuple[int | None, ...]
    others: int
    reduce: str | None = "sum"
    summed: int = 0
    short: bool = False
    dtype: str = "float32"
    stored: str = "float32"

    def text(self, aligned: tuple[bool, ...], fused: bool = True) -> str:
        """The text of the program.

        aligned : for each operand whether its edges are in the order of the rows
        fused : whether sums for each edge use one loop over all edges, whose order is computed for
            each graph
        """
        permuted = [n for n, x in enumerate(self.operands) if x.at == "edge" and not aligned[n]]
        others = range(self.others)
        rank = max(map(len, (self.result, *(x.axes for x in self.operands))))
        write = Writer(NAME)
        write.dense(I="m")
        # Nodes of the first of the other indices are the columns.
        if self.others:
            write.variable("J", "I", "n0", "edges", "indptr", "index0", unique=False)
        else:
            write.variable("J", "I", "edges", "edges", "indptr")
        write.dense(E="edges", **{f"N{n}": f"n{n}" for n in others}, **_lengths(self.loops))
        inner = sorted({-a for x in self.operands for a in x.axes if a is not None and a < 0})
        write.dense(**{f"C{size}": size for size in inner})
        write.dense(**{f"ONE{n}": 1 for n in range(max(1, rank))})
        indices = [*(f"index{n}" for n in others[1:]), *(f"place{n}" for n in permuted)]
        for index in indices:
            write.buffer(index, "I J", "int32")
        for n, operand in enumerate(self.operands):
            axes, _ = self._place(n, operand, n in permuted)
            write.buffer(f"x{n}", axes, operand.dtype)

        def read(n: int, term: int = 0) -> str:
            _, at = self._place(n, self.operands[n], n in permuted, term)
            return write.load(f"X{n}", at, self.dtype)

        def value(n: int) -> str:
            vector = self.operands[n].times
            if vector is None:
                return read(n)
            terms = range(-min(a for a in self.operands[vector].axes if a is not None))
            return f"({' + '.join(f'{read(vector, t)} * {read(n, t)}' for t in terms)})"

        values = map(value, range(len(self.operands)))
        first = [("I", "i")] if self.reduce else [("I", "i"), ("J", "j")]
        result, places = zip(*first, *features(self.result), strict=True)
        write.buffer("out", result, self.stored)
        out = write.load("OUT", places)
        term = filled(self.expression, *values, dtype=self.dtype)
        lines = [f"{out} = {cast(term, self.dtype, self.stored)}"]
        if self.reduce or self.summed:
            lines = reduced(self.reduce or "sum", out, term, self.dtype, self.stored)
        over, names, kinds = self._iteration([f"k{n}" for n in range(len(self.loops))], fused)
        write.visit(NAME, over, kinds, lines, names)
        operands = [f"x{n}" for n in range(len(self.operands))]
        arrays = ["out", *operands, "indptr", "index0", *indices]
        return write.text([*arrays, "m", "edges", *(f"n{n}" for n in others), *_open(self.loops)])

    def sizes(self, shapes: Sequence[Sequence[Any]], result: Sequence[Any]) -> dict[str, Any]:
        """Sizes of a call by name: of loops over features, and numbers of the other indices' nodes.

        shapes, result : shapes of the operands and of the result
        """
        lengths = dict(_loops(result[1:], self.result))
        for shape, operand in zip(shapes, self.operands, strict=True):
            if operand.axes:  # a number for all edges may come in one dimension
                lengths |= _loops(shape[operand.at != "all" :], operand.axes)
            if operand.at == "other":
                lengths[f"n{operand.number}"] = shape[0]
        return lengths

    def _place(
        self, n: int, operand: Operand, permuted: bool, term: int = 0
    ) -> tuple[list[str], list[str]]:
        """The axes of an operand and its index along each; term : number of a product's term."""
        axes, at = {
            "row": (["I"], ["i"]),
            "all": ([], []),
            "edge": (["E"], [f"PLACE{n}[i, j]"]) if permuted else (["I", "J"], ["i", "j"]),
            "other": (
                [f"N{operand.number}"],
                [f"INDEX{operand.number}[i, j]" if operand.number else "j"],
            ),
        }[operand.at]
        for axis, place in features(operand.axes, term):
            axes.append(axis)
            at.append(place)
        return (axes, at) if axes else (["ONE0"], ["0"])

    def _iteration(self, loops: list[str], fused: bool) -> tuple[list[str], list[str], str]:
        """Axes, loops and their kinds, outermost first: rows, heads, edges, features."""
        count, last = len(loops), 0 if self.short else 1
        outside = count - last if self.reduce and count else 0
        axes, names = [f"D{n}" for n in range(count)], ["i", *loops[:outside], "j"]
        names += loops[outside:]
        if self.reduce:
            over = ["I", *axes[:outside], "J", *axes[outside:]]
            kinds = "S" + "S" * outside + "R" + "S" * (count - outside)
        else:
            over = [*(["T.fuse(I, J)"] if self.summed and fused else ["I", "J"]), *axes]
            kinds = "SS" + "S" * (count - self.summed) + "R" * self.summed
        return over, names, kinds

    def refusal(self) -> str:
        """Why the language refuses the program, or ""."""
        if is_kept(self.expected()[0]):
            return ""
        try:
            parsed(self.text((True,) * len(self.operands)))
        except DiagnosticError as error:
            return first_line(error)
        return ""

    def kernel(self, aligned: tuple[bool, ...], config: Config | None = None) -> Kernel:
        """The kernel of :meth:`text`, compiled on first use; it trusts its index arrays.

        config : choices of a search; None for those of the default schedule
        """
        text, target = self.text(aligned), resolve_target("llvm")
        schedule, key = program_space.apply if config else None, _key(text, config)

        def stages() -> Stages:
            return lower(parsed(text), schedule, config or None, target)

        ahead.claim(repr(key))
        return compiled(key, target, stages)

    def expected(self) -> tuple[str, str]:
        """The key and the text of the kernel that a first call is likely to need."""
        orders = (x.at != "edge" or not x.number or self.sorts_first(x) for x in self.operands)
        text = self.text(tuple(orders))
        return repr(_key(text)), text

    def sorts_first(self, operand: Operand) -> bool:
        """Whether an operand of edges is sorted before the kernel runs, not read out of order.

        It has few numbers for many features, so that each would be looked up many times.
        """
        return bool(self.loops) and len(self.loops) - 1 not in operand.axes


def _key(text: str, config: Config | None = None) -> tuple[str, str, Config | None]:
    return NAME, text, config or None


def features(axes: Sequence[int | None], term: int = 0) -> list[tuple[str, str]]:
    """The axes of an array after the first, and its index along each.

    term : number of the term in the sum of a product, whose axis is negative
    """
    of = [(f"C{-a}", str(term)) if a is not None and a < 0 else (f"D{a}", f"k{a}") for a in axes]
    return [(f"ONE{n}", "0") if a is None else of[n] for n, a in enumerate(axes)]


def layout(
    name: str, operands: list[list[tuple[str, str]]], result: list[tuple[str, str]],
    over: list[tuple[str, str]], kinds: str, sizes: list[int | None], lines: list[str],
) -> str:  # fmt: skip
    """A program of one iteration over dense axes: I, and those of features.

    operands, result : axes of each array, and its index along each
    over : axes of the iteration, and the names of their loops
    sizes : sizes of loops over features, None for open ones
    lines : the body
    """
    arrays = {"out": result, **{f"x{n}": axes for n, axes in enumerate(operands)}}
    write = Writer(name)
    write.dense(I="m", **_lengths(sizes))
    ones = sorted({a for axes in arrays.values() for a, _ in axes if a.startswith("ONE")})
    write.dense(**dict.fromkeys(ones, 1))
    for array, axes in arrays.items():
        write.buffer(array, [a for a, _ in axes], "float32")
    write.visit(name, [a for a, _ in over], kinds, lines, [loop for _, loop in over])
    return write.text([*arrays, "m", *_open(sizes)])


def filled(formula: str, *arguments: str, dtype: str | None = None) -> str:
    """A formula with its arguments, and with the type of constants unless `dtype` is None."""
    return formula.format(*arguments, numbers=f"T.{dtype}" if dtype else "{numbers}")


def _open(sizes: Sequence[int | None]) -> list[str]:
    """The size parameters of loops of open size."""
    return [f"d{n}" for n, size in enumerate(sizes) if size is None]


def _lengths(sizes: Sequence[int | None]) -> dict[str, object]:
    """The lengths of feature axes by name: numbers, or parameters for open sizes."""
    return {f"D{n}": size or f"d{n}" for n, size in enumerate(sizes)}


def _loops(sizes: Sequence[Any], axes: Sequence[int | None]) -> dict[str, Any]:
    pairs = zip(sizes, axes, strict=True)
    return {f"d{a}": size for size, a in pairs if a is not None and a >= 0}
