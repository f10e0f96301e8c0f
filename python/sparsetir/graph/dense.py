"""Programs in stage I of pointwise operators that are no region, and of sums of them.

They are for models that run without torch; else torch's kernels are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from sparsetir.graph.expressions import Expression
from sparsetir.graph.programs import features, layout, reduced

NAME = "dense"


def pointwise(
    values: fx.Node, axes: list[int | None], loops: Sequence[Any], stored: set[fx.Node],
    result: list[int | None], reduce: str | None = None, summed: int = 0,
) -> tuple[str, list[fx.Node]]:  # fmt: skip
    """Of pointwise operators, and reduced along the last loops: the program, and its operands.

    Its parameters are `out`, the operands `x0`, `x1` and so on, the number of rows `m`, and `d0`
    and so on for loops whose size is open.

    axes : of the dimensions of the values behind the first one the loop, None for those of size 1
    loops : their sizes
    stored : values that are read
    result : axes of the result, as those of the values
    reduce : along the last loops, "sum", "max" or "min"; `summed` of them

    Raises :class:`sparsetir.graph.expressions.Stored` for what is not of float32.
    """
    expression = Expression(None, dict.fromkeys(stored))
    made = expression.finished(expression.of(values, axes, root=True))
    operands = [
        [*([] if x.at == "all" else [("I", "i")]), *features(x.axes)] or [("ONE0", "0")]
        for x in made.operands
    ]
    reads = (f"X{n}[{', '.join(i for _, i in places)}]" for n, places in enumerate(operands))
    written = [("I", "i"), *features(result)]
    out, term = f"OUT[{', '.join(i for _, i in written)}]", made.text.format(*reads)
    lines = [f"{out} = {term}"] if reduce is None else reduced(reduce, out, term)
    kinds = "S" * (1 + len(loops) - summed) + "R" * summed
    over = [("I", "i"), *((f"D{n}", f"k{n}") for n in range(len(loops)))]
    sizes = [size if isinstance(size, int) else None for size in loops]
    return layout(NAME, operands, written, over, kinds, sizes, lines), made.tensors
