"""The table of docs/operators.md, made of the records of operators.

    python docs/operator_table.py

writes it between `<!-- operators -->` and `<!-- end -->`; `tests/project/test_readme.py` holds
both equal.
"""

from __future__ import annotations

import re
from pathlib import Path

from sparsetir.schedules.operators.names import OPS
from sparsetir.schedules.operators.operands import Operator
from sparsetir.schedules.operators.registry import ALONG, OF_MATRICES, OPERATORS

PAGE = Path(__file__).with_name("operators.md")
MARKED = re.compile(r"(?<=<!-- operators -->\n).*?(?=<!-- end -->)", re.DOTALL)


def table() -> str:
    """A row for each operator of the library."""
    lines = ["| operator | | operands | result | reductions or semirings |", "|--|--|--|--|--|"]
    records = [OPERATORS[name] for name in dict.fromkeys((*OPS, *sorted(OPERATORS)))]
    records = [record for record in records if record.reference is not None]  # no gradients
    several = sorted((*ALONG.values(), *OF_MATRICES.values()), key=lambda x: (x.on, x.name))
    lines += [_row(x) for x in (*records, *several) if x.options or x.on == "matrices"]
    return "\n".join([*lines, ""])


def _row(record: Operator) -> str:
    given = [f"`{name}` {record.shape_text(name)}" for name in record.names]
    values = "values (nnz,), " if record.reads_values else ""
    return (
        f"| `{record.name}` | {record.title} | {values}{', '.join(given)} | "
        f"{record.shape_text('out')} | {', '.join(record.reductions)} |"
    )


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(MARKED.sub(lambda _: table(), text))
