"""What is tuned, and what became of a config that was tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparsetir.sparse_tensor import SparseMatrix

__all__ = ["OK", "PRUNED", "STATES", "Outcome", "Reference", "Task"]

OK = "ok"
PRUNED = "pruned"  # right, but hopelessly slow: not measured to the end
# The others are failures.
STATES = (OK, PRUNED, "wrong", "failed", "crashed", "hung", "out of memory")


@dataclass(frozen=True)
class Task:
    """An operator on a matrix; fields as the arguments of :func:`sparsetir.plan`.

    dtype : a name; target : a text or a dict of texts, which JSON can hold; threads : a number
    """

    op: str
    matrix: SparseMatrix
    feat: int
    dtype: str
    reduce: str = "sum"
    heads: int | None = None
    target: str | Mapping[str, Any] = "llvm"
    threads: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """What `plan` and `plan_candidates` take beside op, matrix and feat."""
        return {
            "dtype": self.dtype, "reduce": self.reduce, "heads": self.heads,
            "target": self.target, "threads": self.threads,
        }  # fmt: skip


@dataclass(frozen=True)
class Reference:
    """A config that others are measured in turns with, and the seconds its calls count as."""

    config: Any
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What became of a config.

    state : one of STATES
    seconds, median : of a call, the least and the median; None unless "ok" or "pruned". Where there
        was a reference, by how many times as long as its calls they lasted in the same turns
    message : one line for a person, where it is a failure
    bytes : of the arrays that hold the arranged matrix (indices, values, padding)
    padding : places without an element, as a fraction of all places
    """

    state: str
    seconds: float | None = None
    median: float | None = None
    message: str = ""
    compile_seconds: float | None = None
    convert_seconds: float | None = None
    padding: float | None = None
    bytes: int | None = None
    launches: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
