"""Small programs: a test has the body, and the axes of each buffer."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np

import sparsetir

__all__ = ["arguments_of", "making", "small", "text_of"]

# Those that a program uses are declared, in this order; behind them what a test gives.
AXES = {
    "I": "T.dense_fixed(m)", "J": "T.sparse_variable(I, (n, nnz), (indptr, indices))",
    "N": "T.dense_fixed(n)", "K": "T.dense_fixed(feat)",
}  # fmt: skip
NAMES = re.compile(r"(?<![\w.\"])[a-z]\w*(?![\w=])")
# The index arrays of an axis come behind its sizes.
HANDLES = re.compile(r"\), \(?(\w+)(?:, (\w+))?[,)]")


def text_of(
    name: str, body: str, axes: str = "", dtype: str = "float32", idtype: str = "",
    first: str = "", **buffers: str,
) -> str:  # fmt: skip
    """The text of a program; its parameters are buffers as they are given, index arrays, and sizes.

    axes : lines of others, behind those of :data:`AXES`; of these, too, which come here then, with
        their names alone if they are as they are there
    first : index arrays, buffers and sizes that come before others of them, in this order; sizes
        that no axis has, too
    buffers : for each one its axes, and its type if that is another: "I J int32"
    """
    lines_of = (line.partition(" = ") for line in axes.strip().splitlines())
    others = {axis: decl or AXES[axis] for axis, _, decl in lines_of}
    declared = {**{axis: decl for axis, decl in AXES.items() if axis not in others}, **others}
    used = {*others}
    used |= set(re.findall(r"\w+", " ".join([body, *buffers.values()]))) - {*buffers}
    for axis in reversed(declared):  # parents come first
        if axis in used:
            used |= {*re.findall(r"\w+", declared[axis])}
    of_type = f', idtype="{idtype}")' if idtype else ")"
    declared = {axis: f"{decl[:-1]}{of_type}" for axis, decl in declared.items() if axis in used}
    names = [w for decl in declared.values() for w in NAMES.findall(decl)]
    names = list(dict.fromkeys([*names, *first.split()]))
    indices = {n for decl in declared.values() for pair in HANDLES.findall(decl) for n in pair}
    handles = [*map(str.lower, buffers), *(n for n in names if n in indices)]
    sizes = [n for n in names if n not in handles]
    lines = [f"{axis} = {decl}" for axis, decl in declared.items()]
    for buffer, over in buffers.items():
        names_of = over.split()
        kind = names_of.pop() if names_of and names_of[-1].islower() else dtype
        shape = "".join(f"{axis}, " for axis in names_of)
        lines.append(f'{buffer} = T.match_sparse_buffer({buffer.lower()}, ({shape}), "{kind}")')
    order = {name: n for n, name in enumerate(first.split())}
    handles, sizes = (sorted(ns, key=lambda n: order.get(n, 99)) for ns in (handles, sizes))
    params = [*(f"{n}: T.handle" for n in handles), *(f"{n}: T.{idtype or 'int32'}" for n in sizes)]
    text = "\n".join([*lines, textwrap.dedent(body).strip("\n")])
    return f"@T.prim_func\ndef {name}({', '.join(params)}):\n{textwrap.indent(text, '    ')}\n"


def small(name: str, body: str, axes: str = "", dtype: str = "float32", **buffers: str) -> Any:
    """The program of :func:`text_of`."""
    return sparsetir.from_source(text_of(name, body, axes, dtype, **buffers))


def making(
    name: str, body: str, axes: str = "", first: str = "", **buffers: str
) -> Callable[[str, str], Any]:
    """A maker of programs for types of values and indices, which the body may use."""

    def make(dtype: str, idtype: str) -> Any:
        typed = {name: over.replace("idtype", idtype) for name, over in buffers.items()}
        text = text_of(name, body, axes, dtype, idtype, first, **typed)
        return sparsetir.from_source(text, {"dtype": dtype, "idtype": idtype})

    return make


def arguments_of(
    func: Any, where: np.ndarray, lengths: dict[str, int], **sizes: int
) -> dict[str, Any]:
    """Arguments for a program over a matrix, with integers in buffers.

    where : the elements that it stores
    lengths : of axes besides I, J and N; sizes : parameters besides m, n and nnz
    """
    (m, n), nnz = where.shape, int(where.sum())
    of, rng = (
        {"I": m, "J": nnz, "N": n, **lengths},
        np.random.default_rng(nnz + sum(sizes.values())),
    )
    indptr = np.cumsum([0, *where.sum(1)]).astype("int32")
    args = {"indptr": indptr, "indices": np.nonzero(where)[1].astype("int32")}
    args |= {"m": m, "n": n, "nnz": nnz, **sizes}
    for buffer in func.buffers:
        names = [axis.name for axis in buffer.axes]
        shape = [of[name] for name in names if name != "I" or "J" not in names]
        args[buffer.name.lower()] = rng.integers(-4, 5, shape).astype("float32")
    return {name: args[name] for name in (str(p.name) for p in func.params)}
