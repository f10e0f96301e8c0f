"""Sums over features for each stored element, visited by position.

The kernel does not know rows: threads get equally many elements, and short rows cost no more than
long ones. (The fused iteration space of SparseTIR, section 4.2.2, with the row of each element
computed once instead of searched for.) The features are left to the default schedule.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsetir.schedules.targets import l2_bytes, l3_bytes
from sparsetir.schedules.templates.shapes import ElementReduction
from sparsetir.sparse_ir.computed import keyword
from sparsetir.sparse_ir.recipes.general import cache_parts
from sparsetir.sparse_ir.schedule import Schedule, SpIter

# Rows of a gathered operand per part: a share of a core's L2 cache, or of the L3 cache. (Zen 3, one
# thread, graphs of 32 to 85 edges a node: parts for the L3 cache take half and a third of the time
# with 256 and 512 features, for which the L2 cache would need too many parts.)
PART_OF_L2, PART_OF_L3 = 3 / 4, 1 / 8


def by_positions(sch: Schedule, sums: ElementReduction, parts: int = 0) -> SpIter:
    """Visit elements by position.

    parts : of the columns, visited one after the other, so that gathered rows stay in cache; 1 for
        the order of storage, 0 for the number that suits the sizes
    """
    if parts:
        return sch.positions(sums.elements, parts=parts if parts > 1 else None)
    named = {name: keyword(size) for name, size in sizes_of(sch, sums).items()}
    default: Any = {"recipe": "cache_parts", **named, **_memory(sums)}
    return sch.positions(
        sums.elements, parts="parts", default=1 if None in named.values() else default
    )


def sizes_of(sch: Schedule, sums: ElementReduction) -> dict[str, Any]:
    """The sizes on which parts depend: rows, columns, elements and features, by short names."""
    row, column = (sch.func.axis(name) for name in sums.elements.axes)
    features = sch.func.axis(sums.features.name)
    return {"m": row.length, "n": column.length, "nnz": column.nnz, "feat": features.length}


def parts_for(sums: ElementReduction, sizes: dict[str, int]) -> int:
    """The number of parts for these sizes, see :func:`sizes_of`."""
    return cache_parts(**sizes, **_memory(sums))


def _memory(sums: ElementReduction) -> dict[str, int]:
    caches = {"cache": int(PART_OF_L2 * l2_bytes()), "shared": int(PART_OF_L3 * l3_bytes())}
    return {"itemsize": np.dtype(sums.dtype).itemsize, **caches}
