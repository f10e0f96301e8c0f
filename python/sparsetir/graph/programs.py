"""The stage-I program of a region, as text, and its kernel.

A region is an expression of edges, with what becomes of it: it is reduced at the nodes that one of
the indices of the edges names, or stored for each edge. Loops over features follow those over
edges. One program, and one kernel, serves any number of nodes and edges; of features, where that is
no multiple of a few, else one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from string import Formatter
from typing import Any

from tvm.error import DiagnosticError

from sparsetir.planning.run_plan import compiled
from sparsetir.records.task import Config
from sparsetir.reductions import COMBINES, EXTREMA
from sparsetir.runtime.file_errors import first_line
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.pipeline import Stages, lower
from sparsetir.schedules.search import program_space
from sparsetir.schedules.targets import resolve_target
from sparsetir.sparse_ir.script.parser import from_source

NAME = "region"
parsed = lru_cache(512)(from_source)  # programs that are refused, compiled and recorded
GIVEN = -1  # the order in which the caller has the edges
# What a reduction begins with, and one step of it; an extremum is NaN if one of them is.
STEPS = {"sum": ("T.float32(0)", "{0} + {1}")} | {
    name: (
        f'T.float32("{COMBINES[name].identity}")',
        f"T.Select(T.Or({{1}} {COMBINES[name].symbol} {{0}}, T.isnan({{1}})), {{1}}, {{0}})",
    )
    for name in EXTREMA
}


@dataclass(frozen=True)
class Operand:
    """A tensor as it is read at an edge.

    at : "row", the node at which the region reduces; "other", a node by another index; "edge"; or
        "all", the same for all edges
    number : for "other" which of the other indices; for "edge" by which index the values are
        sorted, 0 for that of the rows, or `GIVEN`
    axes : of each dimension behind that the loop over features that goes along it, None where its
        size is 1, which no loop goes along; -n for the n numbers that a product sums over
    dtype : its type in memory
    """

    at: str
    number: int
    axes: tuple[int | None, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class Program:
    """A region's expression and what becomes of it: all that its kernel depends on.

    expression : of an edge, in stage I, with {n} for what is read of operand n, {n@l} for the
        product of a vector, operand n, and a small matrix, operand l, and constants of float32,
        which stand for those of the type that it is computed in
    operands : by number
    result : axes of the result, as those of operands
    loops : over features; of each the size, where the kernel is for that alone, else None
    others : indices beside that of the rows
    reduce : at nodes, "sum", "max" or "min"; None for values of edges
    summed : of edges, how many of the last loops are summed up
    short : so few features that the edges of a row are gone through for each of them
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
        """The program, which parses.

        aligned : of each operand whether it has the edges in the order of the rows
        fused : sums for each edge go over all edges in one loop, whose order is computed for each
            graph
        """
        count = len(self.loops)
        permuted = [n for n, x in enumerate(self.operands) if x.at == "edge" and not aligned[n]]
        arrays = [f"x{n}" for n in range(len(self.operands))]
        arrays += ["indptr", *(f"index{n}" for n in range(self.others))]
        arrays += [f"place{n}" for n in permuted]
        sizes = ["m", "edges", *(f"n{n}" for n in range(self.others))]
        sizes += [f"d{n}" for n, size in enumerate(self.loops) if size is None]
        body = ["I = T.dense_fixed(m)"]
        # Nodes by the first of the other indices are the columns.
        if self.others:
            body.append("J = T.sparse_variable(I, (n0, edges), (indptr, index0), unique=False)")
        else:
            body.append("J = T.dense_variable(I, (edges, edges), indptr)")
        body.append("E = T.dense_fixed(edges)")
        body += [f"N{n} = T.dense_fixed(n{n})" for n in range(self.others)]
        body += [f"D{n} = T.dense_fixed({size or f'd{n}'})" for n, size in enumerate(self.loops)]
        ranks = [len(self.result), *(len(x.axes) for x in self.operands)]
        inner = sorted({-a for x in self.operands for a in x.axes if a is not None and a < 0})
        body += [f"C{size} = T.dense_fixed({size})" for size in inner]
        body += [f"ONE{n} = T.dense_fixed(1)" for n in range(max(1, *ranks))]
        matched = [(f"index{n}", ["I", "J"], "int32") for n in range(1, self.others)]
        matched += [(f"place{n}", ["I", "J"], "int32") for n in permuted]
        for n, operand in enumerate(self.operands):
            axes, _ = self._place(n, operand, n in permuted)
            matched.append((f"x{n}", axes, operand.dtype))

        def read(n: int, term: int = 0) -> str:
            operand = self.operands[n]
            _, at = self._place(n, operand, n in permuted, term)
            return cast(f"X{n}[{', '.join(at)}]", operand.dtype, self.dtype)

        def product(field: str) -> str:
            vector, matrix = map(int, field.split("@"))
            terms = range(-min(a for a in self.operands[vector].axes if a is not None))
            return f"({' + '.join(f'{read(vector, t)} * {read(matrix, t)}' for t in terms)})"

        fields = {str(field) for _, field, *_ in Formatter().parse(self.expression)}
        products = {field: product(field) for field in fields if "@" in field}
        reads = map(read, range(len(self.operands)))
        first = [("I", "i")] if self.reduce else [("I", "i"), ("J", "j")]
        result, places = zip(*first, *features(self.result), strict=True)
        matched.append(("out", list(result), self.stored))
        out, term = f"OUT[{', '.join(places)}]", self.expression.format(*reads, **products)
        lines = [f"{out} = {cast(term, self.dtype, self.stored)}"]
        if self.reduce or self.summed:
            lines = reduced(self.reduce or "sum", out, term, self.dtype, self.stored)
        lines = [line.replace("T.float32(", f"T.{self.dtype}(") for line in lines]
        over, names, kinds = self._iteration([f"k{n}" for n in range(count)], fused)
        body += [_buffer(*buffer) for buffer in matched] + [_visit(over, kinds, NAME, names)]
        return _function(NAME, ["out", *arrays], sizes, body, lines)

    def sizes(self, shapes: Sequence[Sequence[Any]], result: Sequence[Any]) -> dict[str, Any]:
        """Sizes of a call by name, of loops over features and of nodes by the other indices.

        shapes, result : of the operands and of the result
        """
        lengths = dict(_loops(result[1:], self.result))
        for shape, operand in zip(shapes, self.operands, strict=True):
            lengths |= _loops(shape[operand.at != "all" :], operand.axes)
            if operand.at == "other":
                lengths[f"n{operand.number}"] = shape[0]
        return lengths

    def _place(
        self, n: int, operand: Operand, permuted: bool, term: int = 0
    ) -> tuple[list[str], list[str]]:
        """The axes of an operand, and where it is read; term : of a product."""
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
        """Axes, loops and their kinds, from the outside in: rows, heads, edges, features."""
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
        """Why the language refuses the program, "" for one that it takes."""
        try:
            parsed(self.text((True,) * len(self.operands)))
        except DiagnosticError as error:
            return first_line(error)
        return ""

    def kernel(self, aligned: tuple[bool, ...], config: Config | None = None) -> Kernel:
        """The kernel of :meth:`text`, compiled when it is first wanted; trusts its index arrays.

        config : choices that a search found, by default those of the default schedule
        """
        text, target = self.text(aligned), resolve_target("llvm")
        schedule = program_space.apply if config else None

        def stages() -> Stages:
            return lower(parsed(text), schedule, config or None, target)

        return compiled((NAME, text, config or None), target, stages)


def features(axes: Sequence[int | None], term: int = 0) -> list[tuple[str, str]]:
    """The axes behind the first one of an array, and where it is read along each.

    term : of the sum that a product is, whose axis has a negative number
    """
    of = [(f"C{-a}", str(term)) if a is not None and a < 0 else (f"D{a}", f"k{a}") for a in axes]
    return [(f"ONE{n}", "0") if a is None else of[n] for n, a in enumerate(axes)]


def layout(
    name: str, operands: list[list[tuple[str, str]]], result: list[tuple[str, str]],
    over: list[tuple[str, str]], kinds: str, sizes: list[int | None], lines: list[str],
) -> str:  # fmt: skip
    """A program of one iteration over dense axes, I and features.

    operands, result, over : axes, and where arrays are read along them or the names of loops
    sizes : of loops over features, None of open ones
    lines : of the body
    """
    arrays = {"out": result, **{f"x{n}": axes for n, axes in enumerate(operands)}}
    open_sizes = [f"d{n}" for n, size in enumerate(sizes) if size is None]
    body = ["I = T.dense_fixed(m)"]
    body += [f"D{n} = T.dense_fixed({size or f'd{n}'})" for n, size in enumerate(sizes)]
    ones = sorted({a for axes in arrays.values() for a, _ in axes if a.startswith("ONE")})
    body += [f"{one} = T.dense_fixed(1)" for one in ones]
    body += [_buffer(array, [a for a, _ in axes]) for array, axes in arrays.items()]
    body.append(_visit([a for a, _ in over], kinds, name, [loop for _, loop in over]))
    return _function(name, list(arrays), ["m", *open_sizes], body, lines)


def cast(value: str, dtype: str, to: str) -> str:
    """The text of a value of a type in another one."""
    return value if dtype == to else f'T.Cast("{to}", {value})'


def reduced(
    reduce: str, out: str, term: str, dtype: str = "float32", stored: str = "float32"
) -> list[str]:
    """Lines of an iteration that reduces a term by "sum", "max" or "min".

    dtype, stored : types of the term and of the result
    """
    first, step = STEPS[reduce]
    step = step.format(cast(out, stored, dtype), f"({term})")
    first, step = (cast(value, dtype, stored) for value in (first, step))
    return ["with T.init():", f"    {out} = {first}", f"{out} = {step}"]


def _loops(sizes: Sequence[Any], axes: Sequence[int | None]) -> dict[str, Any]:
    found = zip(sizes, axes, strict=True)
    return {f"d{a}": size for size, a in found if a is not None and a >= 0}


def _function(
    name: str, arrays: Sequence[str], sizes: list[str], body: list[str], lines: list[str]
) -> str:
    """A function of arrays and sizes: its body, the last line of which is an iteration, and the
    lines of that."""
    head = [f"{array}: T.handle," for array in arrays] + [f"{size}: T.int32," for size in sizes]
    body = [*body, *(f"    {line}" for line in lines)]
    text = ["@T.prim_func", f"def {name}(", *(f"    {line}" for line in head), "):"]
    return "\n".join([*text, *(f"    {line}" for line in body)]) + "\n"


def _visit(over: Sequence[str], kinds: str, name: str, loops: Sequence[str]) -> str:
    return f'with T.sp_iter([{", ".join(over)}], "{kinds}", "{name}") as [{", ".join(loops)}]:'


def _buffer(array: str, axes: Sequence[str], dtype: str = "float32") -> str:
    return f'{array.upper()} = T.match_sparse_buffer({array}, ({", ".join(axes)},), "{dtype}")'
