"""Small programs, of which a test says the body, and which axes its buffers lie over."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import sparsetir

__all__ = ["small"]

# Those that a program uses are declared, in this order; others are given by the test.
AXES = {
    "I": "T.dense_fixed(m)", "J": "T.sparse_variable(I, (n, nnz), (indptr, indices))",
    "N": "T.dense_fixed(n)", "K": "T.dense_fixed(feat)",
}  # fmt: skip
HANDLES = re.compile(r"ind|\w+_?(ptr|idx)|[pqst]\b")  # names of index arrays; others are of sizes


def small(name: str, body: str, axes: str = "", dtype: str = "float32", **buffers: str) -> Any:
    """A program; its parameters are buffers as they are given, index arrays, and sizes.

    axes : lines of others, or of those of :data:`AXES` otherwise
    buffers : for each one its axes, and its type if that is another: "I J int32"
    """
    declared = {**AXES, **dict(re.findall(r"(\w+) = (.*)", axes))}
    used = set(re.findall(r"\w+", " ".join([body, *buffers.values()])))
    for axis in reversed(declared):  # parents come first
        if axis in used:
            used |= {*re.findall(r"\w+", declared[axis])}
    declared = {axis: made for axis, made in declared.items() if axis in used}
    names = [w for made in declared.values() for w in re.findall(r"(?<![\w.])[a-z]\w*", made)]
    names = list(dict.fromkeys(names))
    handles = [*map(str.lower, buffers), *(n for n in names if HANDLES.match(n))]
    sizes = [f"{n}: T.int32" for n in names if not HANDLES.match(n)]
    lines = [f"{axis} = {made}" for axis, made in declared.items()]
    for buffer, over in buffers.items():
        *over, kind = [*over.split(), dtype] if over[-1:].isupper() else over.split()
        lines.append(
            f'{buffer} = T.match_sparse_buffer({buffer.lower()}, ({", ".join(over)},), "{kind}")'
        )
    params = ", ".join([f"{n}: T.handle" for n in handles] + sizes)
    text = "\n".join([*lines, textwrap.dedent(body).strip("\n")])
    return sparsetir.from_source(
        f"@T.prim_func\ndef {name}({params}):\n{textwrap.indent(text, '    ')}\n"
    )
