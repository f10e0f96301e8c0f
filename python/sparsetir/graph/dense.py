"""Stage-I programs of pointwise operators outside regions, and of their reductions.

They serve models that run without torch; otherwise torch's kernels are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from sparsetir.graph.expressions import Expression, Stored
from sparsetir.graph.programs import features, filled, layout
from sparsetir.sparse_ir.script.writer import reduced

NAME = "dense"


def pointwise(
    values: fx.Node, axes: list[int | None], loops: Sequence[Any], stored: set[fx.Node],
    result: list[int | None], reduce: str | None = None, summed: int = 0,
) -> tuple[str, list[fx.Node]]:  # fmt: skip
    """The program of pointwise operators, reduced along the last loops, and its operands.

    Its parameters are `out`, the operands `x0`, `x1` and so on, the number of rows `m`, and `d0`
    and so on for loops of open size.

    axes : for each dimension of the values after the first its loop, None for those of size 1
    loops : sizes of the loops
    stored : values that are read
    result : axes of the result, like those of the values
    reduce : reduction along the last `summed` loops, "sum", "max" or "min"

    Raises :class:`Stored` for operands that are not of float32.
    """
    expression = Expression(None, dict.fromkeys(stored))
    finished = expression.finished(expression.of(values, axes, root=True))
    for x, tensor in zip(finished.operands, finished.tensors, strict=True):
        if x.dtype != "float32":
            raise Stored(tensor)
    operands = [
        [*([] if x.at == "all" else [("I", "i")]), *features(x.axes)] or [("ONE0", "0")]
        for x in finished.operands
    ]
    reads = (f"X{n}[{', '.join(i for _, i in places)}]" for n, places in enumerate(operands))
    written = [("I", "i"), *features(result)]
    out = f"OUT[{', '.join(i for _, i in written)}]"
    term = filled(finished.text, *reads, dtype="float32")
    lines = [f"{out} = {term}"] if reduce is None else reduced(reduce, out, term)
    kinds = "S" * (1 + len(loops) - summed) + "R" * summed
    over = [("I", "i"), *((f"D{n}", f"k{n}") for n in range(len(loops)))]
    sizes = [size if isinstance(size, int) else None for size in loops]
    return layout(NAME, operands, written, over, kinds, sizes, lines), finished.tensors
