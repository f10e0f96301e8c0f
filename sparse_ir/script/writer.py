"""Stage-I functions written as text, for programs generated from tables and loops."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from sparsetir.reductions import COMBINES
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.promises import with_fact
from sparsetir.sparse_ir.script.parser import from_source

Names = str | Iterable[str]


class Writer:
    """A stage-I function whose declarations and iterations are written in the order of calls.

    Axes are passed as a list of names, or as names separated by blanks.

    name : the function's name
    idtype : the type of its sizes and axes
    """

    def __init__(self, name: str, idtype: str = "int32") -> None:
        self.name, self.idtype = name, idtype
        self.lines: list[str] = []
        self._typed = "" if idtype == "int32" else f', "{idtype}"'
        self._types: dict[str, str] = {}  # of parameters that are no sizes
        self._dtypes: dict[str, str] = {}
        self._facts: list[dict[str, str]] = []
        self._attributes: dict[str, Any] = {}

    def dense(self, **sizes: object) -> None:
        """Declare dense axes of these sizes, by name."""
        self.lines += [f"{a} = T.dense_fixed({size}{self._typed})" for a, size in sizes.items()]

    def variable(
        self, axis: str, parent: str, length: str, nnz: str, indptr: str, indices: str = "",
        unique: bool = True,
    ) -> None:  # fmt: skip
        """Declare an axis below another one; dense if it has no indices."""
        self._types |= {indptr: "handle", indices: "handle"}
        arrays, kind = (f"({indptr}, {indices})", "sparse") if indices else (indptr, "dense")
        more = self._typed if unique else f"{self._typed}, unique=False"
        shape = f"({length}, {nnz})"
        self.lines.append(f"{axis} = T.{kind}_variable({parent}, {shape}, {arrays}{more})")

    def buffer(self, array: str, axes: Names, dtype: str, name: str = "") -> None:
        """Declare a parameter's buffer, by default with the parameter's name in capitals."""
        name, over = name or array.upper(), f"({', '.join(_names(axes))},)"
        self._types[array] = "handle"
        self._dtypes[name] = dtype
        self.lines.append(f'{name} = T.match_sparse_buffer({array}, {over}, "{dtype}")')

    def number(self, name: str, dtype: str) -> None:
        """Declare a parameter that is a number of another type than sizes."""
        self._types[name] = dtype

    def local(self, dtype: str, **axes: str) -> None:
        """Declare local buffers over these axes, by name."""
        for name, names in axes.items():
            over = "".join(f"{axis}, " for axis in _names(names))
            self.lines.append(f'{name} = T.alloc_sparse_buffer(({over}), "{dtype}", "local")')

    def load(self, buffer: str, at: Names, dtype: str | None = None) -> str:
        """The text of a load, cast to `dtype` if given."""
        text, stored = f"{buffer}[{', '.join(_names(at))}]", self._dtypes[buffer]
        return cast(text, stored, dtype or stored)

    def fact(self, fact: str, **about: str) -> None:
        """Assume a fact, see :mod:`sparsetir.sparse_ir.promises`."""
        self._facts.append({"fact": fact, **about})

    def attribute(self, name: str, value: Any) -> None:
        """Set an attribute of the function."""
        self._attributes[name] = value

    def visit(
        self, name: str, axes: Names, kinds: str, body: Iterable[str], loops: Names | None = None
    ) -> None:
        """Write an iteration, see :func:`visited`."""
        self.lines += visited(name, axes, kinds, body, loops)

    def products(
        self, name: str, axes: Names, kinds: str, elements: Mapping[str, str], dtype: str,
        loops: Names | None = None, sets: bool = True,
    ) -> None:  # fmt: skip
        """Write an iteration that sums products.

        elements : by buffer name the axes of an element of the result, which comes first, and of
            the factors (their loops are the lower-case names); or, in brackets, loads used as
            indices
        dtype : the type of the sums
        sets : whether the result is set, not added to
        """
        (result, at), *factors = elements.items()
        stored, out = self._dtypes[result], self.load(result, at.lower())
        loops_of = ((x, at if "[" in at else at.lower()) for x, at in factors)
        term = " * ".join(self.load(x, at, dtype) for x, at in loops_of)
        lines = reduced("sum", out, term, dtype, stored, f"T.{stored}(0)")
        self.visit(name, axes, kinds, lines if sets else lines[2:], loops)

    def text(self, params: Names) -> str:
        """The text of the function, with those of the parameters that its lines mention."""
        used = set(re.findall(r"\w+", "\n".join(self.lines)))
        kinds = ((x, self._types.get(x, self.idtype)) for x in _names(params))
        head = [f"    {x}: T.{kind}," for x, kind in kinds if x in used]
        lines = [f"    {line}" for line in self.lines]
        return "\n".join(["@T.prim_func", f"def {self.name}(", *head, "):", *lines]) + "\n"

    def program(self, params: Names, **names: Any) -> SparseFunc:
        """The function; names : Python values that its lines use."""
        func = from_source(self.text(params), names)
        for name, value in self._attributes.items():
            func = func.with_attr(name, value)
        for fact in self._facts:
            func = with_fact(func, **fact)
        return func


def _names(names: Names) -> list[str]:
    return names.split() if isinstance(names, str) else list(names)


def visited(
    name: str, axes: Names, kinds: str, body: Iterable[str], loops: Names | None = None
) -> list[str]:
    """Lines of an iteration; loops : the variable of each axis, by default its lower-case name."""
    over = _names(axes)
    variables = ", ".join(map(str.lower, over) if loops is None else _names(loops))
    head = f'with T.sp_iter([{", ".join(over)}], "{kinds}", "{name}") as [{variables}]:'
    return [head, *(f"    {line}" for line in body)]


def cast(value: str, dtype: str, to: str) -> str:
    """The text of a value of one type, cast to another."""
    return value if dtype == to else f'T.Cast("{to}", {value})'


def reduced(
    reduce: str, out: str, term: str, dtype: str = "float32", stored: str = "float32",
    first: str | None = None,
) -> list[str]:  # fmt: skip
    """Lines of an iteration that reduces a term by one of COMBINES.

    dtype, stored : types of the term and of the result
    first : the initial value, by default the operator's identity
    """
    combine, held, term = COMBINES[reduce], cast(out, stored, dtype), f"({term})"
    step = f"{held} {combine.symbol} {term}"
    if combine.is_extremum:
        better = f"{term} {combine.symbol} {held}"
        if "float" in dtype:  # NaN if either is
            better = f"T.Or({better}, T.isnan({term}))"
        step = f"T.Select({better}, {term}, {held})"
    identity = f'"{combine.identity}"' if combine.is_extremum else combine.identity
    first = first or cast(f"T.{dtype}({identity})", dtype, stored)
    return ["with T.init():", f"    {out} = {first}", f"{out} = {cast(step, dtype, stored)}"]
