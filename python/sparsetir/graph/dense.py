"""Programs in stage I of pointwise operators that are no region, and of sums of them.

They are for models that run without torch; else torch's kernels are there.
"""

from __future__ import annotations

import re

from torch import fx

from sparsetir.graph.expressions import Expression
from sparsetir.graph.programs import REDUCTIONS, features, layout

NAME = "dense"


class Dense:
    """A program over rows and features.

    text : of the program, whose parameters are `out`, the operands `x0`, `x1` and so on, the number
        of rows `m`, and `d0` and so on for loops whose size is open
    tensors : operands, in order
    """

    def __init__(self, text: str, tensors: list[fx.Node]) -> None:
        self.text, self.tensors = text, tensors


def pointwise(
    values: fx.Node, axes: list[int | None], sizes: list[int | None], stored: set[fx.Node],
    result: list[int | None], reduce: str | None = None, summed: int = 0,
) -> Dense:  # fmt: skip
    """Of pointwise operators, and reduced along the last loops.

    axes : of the dimensions of the values behind the first one the loop, None for those of size 1
    sizes : of the loops, None for one that is open
    stored : values that are read
    result : axes of the result, as those of the values
    reduce : along the last loops, "sum", "max" or "min"; `summed` of them

    Raises :class:`sparsetir.graph.expressions.Stored` for what is not of float32.
    """
    expression = Expression(None, dict.fromkeys(stored))
    found = expression.of(values, axes, root=True)
    read = sorted({int(n) for n in re.findall(r"{(\d+)}", found)})
    operands = []
    for n in read:
        operand = expression.operands[n]
        first = [] if operand.at == "all" else [("I", "i")]
        operands.append([*first, *features(operand.axes)] or [("ONE0", "0")])
    written = [("I", "i"), *features(result)]
    places = {
        f"{n}": f"X{at}[{', '.join(i for _, i in operands[at])}]" for at, n in enumerate(read)
    }
    term = re.sub(r"{(\d+)}", lambda match: places[match[1]], found)
    out = f"OUT[{', '.join(i for _, i in written)}]"
    count = len(sizes)
    kinds = "S" * (1 + count - summed) + "R" * summed
    lines = [f"{out} = {term}"]
    if reduce is not None:
        first, step = REDUCTIONS[reduce]
        lines = [
            "with T.init():",
            f"    {out} = {first}",
            f"{out} = {step.format(out, f'({term})')}",
        ]
    over = [("I", "i"), *((f"D{n}", f"k{n}") for n in range(count))]
    text = layout(NAME, operands, written, over, kinds, sizes, lines)
    return Dense(text, [expression.tensors[n] for n in read])
