"""Tuning tasks, outcomes of tried configs, and the parts of a record's key, which identify or
compare matrices and machines."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log2
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import tvm

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.formats.pattern import Pattern
from sparsetir.machine import this_machine
from sparsetir.schedules import arguments
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.targets import (
    TargetLike,
    cpu_name,
    distinctive_features,
    host_features,
    host_target,
    is_gpu,
)
from sparsetir.schedules.template import Choices
from sparsetir.sparse_ir.index_arrays import index_type

OK = "ok"
PRUNED = "pruned"  # correct, but hopelessly slow: not measured to the end
# The others are failures.
STATES = (OK, PRUNED, "wrong", "failed", "crashed", "hung", "out of memory")
Config: TypeAlias = arguments.Config | Choices  # of all templates


@dataclass(frozen=True)
class Task:
    """An operator on a matrix, by which records are looked up.

    The fields are arguments of :func:`sparsetir.plan`; sizes may stand for the matrix.
    """

    op: str
    matrix: Any
    feat: int
    dtype: str
    reduce: str = "sum"
    heads: int | None = None
    target: TargetLike = "llvm"
    threads: int = 1


def thread_text(task: Any) -> list[str]:
    """The number of threads, to display; empty for a GPU, for which it does not matter."""
    if "cuda" in str(task.target):
        return []
    return [f"{task.threads} thread{'s' * (task.threads != 1)}"]


@dataclass(frozen=True)
class Reference:
    """The config that takes turns with measured ones, and the nominal time of its calls."""

    config: Config
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """The result of measuring a config.

    state : one of STATES
    seconds, median : least and median time of a call; None unless "ok" or "pruned". With a
        reference, relative to its calls in the same turns
    message : a readable line, for a failure
    bytes : size of the arrays of the arranged matrix (indices, values, padding)
    padding : slots without an element, as a fraction of all slots
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


# -- parts of a record's key -----------------------------------------------------------------------


QUANTILES = (0.25, 0.5, 0.75, 0.9, 0.99)
# Fingerprints of 32 characters, which keep no pattern alive.
_known: WeakKeyDictionary[Pattern, str] = WeakKeyDictionary()


class Sizes(NamedTuple):
    """The fields of a key about a matrix, except its fingerprint; stands for a matrix in a task."""

    shape: tuple[int, ...]
    nnz: int


class Matrices(NamedTuple):
    """The operands of an operator on several matrices, in place of its matrix."""

    each: tuple[SparseMatrix, ...]
    mask: SparseMatrix | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first."""
        return self.each[0].shape

    def result_shape(self, op: str) -> tuple[int, int]:
        """The shape of an operator's result."""
        (m, n), (p, q) = self.shape, self.each[-1].shape
        return (m * p, n * q) if op == "kron" else (m, p if op == "inner" else q)

    @property
    def nnz(self) -> int:
        """Elements of all but the mask."""
        return sum(x.nnz for x in self.each)


def fingerprint(matrix: SparseMatrix | CsrPattern | RelationPattern | Matrices | Sizes) -> str:
    """A hash of the shape and the stored coordinates, 32 hex digits; empty for sizes alone.

    It is the same for int32 and int64 indices, and for both byte orders. Computed once per pattern
    of a SparseMatrix, which matrices with other values share. The columns of a CsrPattern must be
    sorted in each row; one with duplicate elements equals no SparseMatrix's.
    """
    if isinstance(matrix, Sizes):
        return ""
    if isinstance(matrix, Matrices):
        there = [fingerprint(x) for x in (*matrix.each, matrix.mask) if x is not None]
        return hashlib.blake2b("-".join(there).encode(), digest_size=16).hexdigest()
    if isinstance(matrix, CsrPattern | RelationPattern):
        return _digest(matrix)
    pattern = matrix.pattern
    digest = _known.get(pattern)
    if digest is None:
        digest = _known[pattern] = _digest(pattern)
    return digest


def _digest(pattern: Pattern | CsrPattern | RelationPattern) -> str:
    """Hash of the shape and of index arrays."""
    if isinstance(pattern, RelationPattern):
        arrays = pattern[:4]
    elif isinstance(pattern, CsrPattern):
        arrays = pattern.indptr, pattern.indices
    else:
        arrays = pattern.indptr, pattern.columns
    # The type depends on the sizes alone; most patterns have it already, so nothing is copied.
    idtype = "<i4" if index_type(max(*pattern.shape, pattern.nnz)) is np.int32 else "<i8"
    out = hashlib.blake2b(np.array([*pattern.shape, pattern.nnz], "<i8").data, digest_size=16)
    for array in arrays:
        out.update(np.ascontiguousarray(array, idtype).data)
    return out.hexdigest()


def statistics(matrix: SparseMatrix) -> dict[str, float]:
    """Numbers whose differences tell how similar two matrices are.

    m, n, nnz; the mean, standard deviation ("row_std"), maximum and quantiles ("row_q50") of the
    lengths of rows, and the share of empty rows; the mean and maximum of the lengths of columns.
    """
    m, n = matrix.shape
    rows = np.diff(matrix.pattern.indptr)
    cols = np.bincount(matrix.pattern.columns, minlength=n)
    out = {"m": m, "n": n, "nnz": matrix.nnz}
    out |= {"row_mean": matrix.nnz / max(1, m), "row_max": rows.max(initial=0)}
    out |= {"col_mean": matrix.nnz / max(1, n), "col_max": cols.max(initial=0)}
    out["row_std"] = rows.std() if m else 0
    out["row_empty"] = np.count_nonzero(rows == 0) / max(1, m)
    quantiles = np.quantile(rows, QUANTILES) if m else np.zeros(len(QUANTILES))
    out |= {f"row_q{100 * q:.0f}": x for q, x in zip(QUANTILES, quantiles, strict=True)}
    return {name: float(x) for name, x in out.items()}


def shape_class(task: Task) -> str:
    """Sizes to the nearest power of two: "m12-n12-z15-f7" for about 4096 rows and columns.

    z is the number of stored elements, f that of features; r, before them, that of relations.
    """
    shape: tuple[int, ...] = task.matrix.shape
    sizes = dict(zip("rmn"[-len(shape) :], shape, strict=True))
    sizes |= {"z": task.matrix.nnz, "f": task.feat}
    return "-".join(f"{name}{round(log2(max(1, size)))}" for name, size in sizes.items())


def device_name(target: tvm.target.Target) -> str:
    """The device that runs the target on this machine: a CPU's model, or a GPU's name.

    target : tvm.target.Target; the result for a missing GPU is its architecture

    Models of CPUs include the features that decide which schedules are fast, as in "Intel(R)
    Xeon(R) Processor @ 2.50GHz (avx2 avx512f avx512vnni)": virtual machines hide features, and name
    several generations alike.
    """
    if not is_gpu(target):
        features = distinctive_features(name for name, has in host_features().items() if has)
        return f"{cpu_model()} ({' '.join(features)})" if features else cpu_model()
    device = tvm.runtime.device(target.kind.name, 0)
    if device.exist:
        return str(device.device_name)
    return str(target.attrs.get("arch", target.kind.name))


def cpu_model() -> str:
    """The system's name of the CPU, or else LLVM's."""
    machine = this_machine()
    return machine.model or f"{machine.architecture} {cpu_name(host_target())}"
