"""Set an annotation of an iteration; it rides on the blocks of stage II."""

from __future__ import annotations

from typing import Any

from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.schedule.handles import SparseIterationRef
from sparsetir.sparse_ir.schedule.loops import changed, find_iteration, name_of, replaced

__all__ = ["annotate"]


def annotate(
    func: SparseFunc, iteration: SparseIterationRef, key: str, value: Any
) -> tuple[SparseFunc, None]:
    """The function with the annotation set."""
    it = find_iteration(func, name_of("annotate", iteration))
    new = changed(it, annotations={**dict(it.annotations.items()), key: value})
    return replaced("annotate", func, it, new), None
