"""The tasks that are tuned, and the outcomes of configs that were tried."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.records.fingerprint import fingerprint, shape_class, statistics
from sparsetir.schedules.operators.registry import OPERATORS

OK = "ok"
PRUNED = "pruned"  # right, but hopelessly slow: not measured to the end
# The others are failures.
STATES = (OK, PRUNED, "wrong", "failed", "crashed", "hung", "out of memory")


class Compiled(Protocol):
    """Interface of all templates' configs."""

    @property
    def compiled(self) -> Hashable:
        """The fields that a kernel depends on."""
        ...


class Config(Compiled, Protocol):
    """Interface of a template's configs for plans."""

    def tiles(self, feat: int, /) -> int:
        """Tiles of so many features; raises ScheduleError for those that it does not serve."""
        ...


class Tunable(Protocol):
    """Interface of a search's subject for measurers, records and reports; workers get it by pickle.

    :class:`Task` is an operator, :class:`sparsetir.tuning.program.ProgramTask` a user's function.
    """

    @property
    def target(self) -> str | Mapping[str, Any]:
        """A text or a dict of texts, which JSON can hold."""
        ...

    @property
    def threads(self) -> int:
        """The CPU's threads."""
        ...

    def identity(self) -> dict[str, Any]:
        """The fields of a :class:`sparsetir.records.record.Key` but target, threads and device."""
        ...

    def statistics(self) -> dict[str, float]:
        """Numbers that say how alike two of its kind are."""
        ...

    def title(self, name: str = "") -> str:
        """One line for people; name : what they call the data."""
        ...


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
        """Options of `plan` and `plan_candidates` beside op, matrix and feat."""
        return {
            "dtype": self.dtype,
            "reduce": self.reduce,
            "heads": self.heads,
            "target": self.target,
            "threads": self.threads,
        }

    def identity(self) -> dict[str, Any]:
        """See :class:`Tunable`."""
        return {
            "op": self.op,
            "dtype": self.dtype,
            "reduce": self.reduce,
            "heads": None if self.heads is None else int(self.heads),
            "feat": int(self.feat),
            "shape_class": shape_class(self),
            "fingerprint": fingerprint(self.matrix),
        }

    def statistics(self) -> dict[str, float]:
        """See :class:`Tunable`."""
        return statistics(self.matrix)

    def title(self, name: str = "") -> str:
        """See :class:`Tunable`."""
        m, n = self.matrix.shape
        on = f" on {name}" if name else ""
        words = [] if OPERATORS[self.op].vectors else [f"{self.feat} features"]
        words += [self.reduce] if self.reduce != "sum" else []
        words += [f"{self.heads} heads"] if self.heads is not None else []
        words += [self.dtype, *of_threads(self)]
        return f"{self.op}{on} ({m:,} x {n:,}, {self.matrix.nnz:,} elements), {', '.join(words)}"


def of_threads(task: Tunable) -> list[str]:
    """The number of threads for people; nothing for a GPU, where it plays no part."""
    if "cuda" in str(task.target):
        return []
    return [f"{task.threads} thread{'s' * (task.threads != 1)}"]


@dataclass(frozen=True)
class Reference:
    """A config that others are measured in turns with, and the seconds its calls count as."""

    config: Config
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """The result of measuring a config.

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
    extra: Mapping[str, object] = field(default_factory=dict)
