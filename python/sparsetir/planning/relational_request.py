"""What plans of relational gather-matmul-scatter are asked for, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from sparsetir.data.sparse_tensor import SparseTensor
from sparsetir.formats import Pattern
from sparsetir.planning.request import (
    Request,
    check_counts,
    check_dtypes,
    default_threads,
    idtype_for,
)
from sparsetir.records.task import Task
from sparsetir.runtime import pool
from sparsetir.runtime.targets import resolve_target
from sparsetir.schedules.operators.operands import rounded
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.operators.rgms import Rgms
from sparsetir.schedules.search.choose_rgms import choose_rgms, config_of, tried, whole_vectors
from sparsetir.schedules.search.spaces import Space
from sparsetir.schedules.template import Template
from sparsetir.schedules.templates.registry import templates_for
from sparsetir.sparse_ir.errors import ScheduleError


@dataclass(frozen=True)
class RelationalRequest(Request):
    """Relational gather-matmul-scatter on a tensor; :func:`relational_request` makes it.

    matrix : by (relation, row, column); a RelationPattern where there are no values
    feat_in, feat : features of X and of Y; :attr:`whole` is for those that kernels have
    threads : of the CPU
    blocks : of features, each of as many, where the problem has them in blocks
    The others as of :class:`Request`.
    """

    matrix: SparseTensor | RelationPattern
    problem: Rgms
    feat_in: int
    feat: int
    threads: int
    target: Any
    blocks: int = 1

    @property
    def name(self) -> str:
        """Of the operator."""
        return "rgms"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of operands, of values "a" if they play a part, and of the result "out"."""
        relations, m, n = self.matrix.shape
        blocks = (self.blocks,) if self.problem.in_blocks else ()
        w = (relations, *blocks, self.feat_in, self.feat)
        operands = {"x": (n, *blocks, self.feat_in), "w": w}
        return {**operands, "out": (m, *blocks, self.feat), **self._values_shape}

    @property
    def _values_shape(self) -> dict[str, tuple[int, ...]]:
        return {"a": (self.matrix.nnz,)} if self.problem.weighted else {}

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes beside those of the pattern, by the names of the operator's parameters."""
        blocks = {"blocks": self.blocks} if self.problem.in_blocks else {}
        return {"feat_in": self.feat_in, "feat": self.feat, **blocks}

    @property
    def is_recorded(self) -> bool:
        """See :class:`Request`: sums and values of one type, set, on a CPU."""
        p = self.problem
        plain = p.out is None and p.values is None and not p.added and not p.in_blocks
        return plain and not self.gpu

    @cached_property
    def csf(self) -> RelationPattern:
        """The rows of each relation."""
        if isinstance(self.matrix, RelationPattern):
            return self.matrix
        relations, m, n = self.matrix.shape
        relation, row, column = self.matrix.pattern.coords
        return RelationPattern.of(relation, row, column, (relations, m, n), self.problem.idtype)

    @property
    def pattern(self) -> Pattern | RelationPattern:
        """As templates take it: of a tensor CSF for CPUs, coordinates for GPUs."""
        if self.gpu and isinstance(self.matrix, SparseTensor):
            return self.matrix.pattern
        return self.csf

    @property
    def whole(self) -> RelationalRequest:
        """The same for features that fill vectors, with zeros behind those that are given."""
        given = {"feat_in": self.feat_in, "feat": self.feat}
        whole = {n: whole_vectors(self.problem, x, self.target) for n, x in given.items()}
        return replace(self, **whole)

    def task(self) -> Task:
        """What records of tuning are looked up by."""
        reduce = f"sum-of-{self.feat_in}" + ("" if self.problem.weighted else "-unweighted")
        matrix: Any = self.csf
        return Task(
            self.name, matrix, self.feat, self.problem.dtype, reduce, None, self.target,
            self.threads,
        )  # fmt: skip

    def template(self, config: Any) -> Template:
        """See :class:`Request`; raises ScheduleError for other features than a config's."""
        found = super().template(config)
        if config.feat_in not in (None, self.feat_in):
            raise ScheduleError(
                f"plan: argument 'feat_in': the config serves {config.feat_in} features, got "
                f"{self.feat_in}"
            )
        return found

    def arguments(self) -> dict[str, Any]:
        """Of the plain program, with random values and operands, but the result."""
        rng = np.random.default_rng(0)
        dtype = self.problem.dtype
        arrays = {
            name: rounded(rng.uniform(-1, 1, shape), dtype).astype(dtype)
            for name, shape in self.shapes.items()
            if name != "out"
        }
        return {**arrays, **self.csf.arguments(), **self.sizes}

    def chosen(self) -> Any:
        """The config of a plan whose user names none."""
        return self.candidates()[0] if self.gpu else choose_rgms(**self._choosing)

    def candidates(self) -> list[Any]:
        """Configs worth measuring, that of :meth:`chosen` first."""
        if not self.gpu:
            return self.space().branches[0].one_by_one()
        asked = self.problem, self.pattern, self, self.target
        found = (t.configs(*asked) for t in templates_for(self.problem, True) if t.configs)
        return [config for each in found for config in each]

    def space(self) -> Space:
        """What a search on a CPU tries, the first values those of :meth:`chosen`."""
        return Space((tried(**self._choosing),))

    def of_choices(self, **choices: Any) -> Any:
        """See :class:`Request`."""
        return config_of(**choices)

    @property
    def _choosing(self) -> dict[str, Any]:
        """What configs for CPUs are chosen by."""
        rows, blocks = len(self.csf.rows), self.blocks if self.problem.in_blocks else 1
        return {
            "problem": self.problem, "nnz_rows": rows, "feat_in": self.feat_in, "feat": self.feat,
            "target": self.target, "threads": self.threads, "relations": self.csf.shape[0],
            "blocks": blocks, "work_of_threads": pool.work_of_threads(),
        }  # fmt: skip


@dataclass(frozen=True)
class GradientRequest(RelationalRequest):
    """A gradient of relational gather-matmul-scatter for weights, on a GPU.

    problem : a RgmsGradient, of relations' or of edges'
    The others as of :class:`RelationalRequest`, of the operator whose gradient it is.
    """

    problem: Any

    @property
    def name(self) -> str:
        """Of the operator."""
        return "rgms_edge" if self.problem.edges else "rgms_weight"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of x, the gradient of the result, with `edges` w, of "a" and of "out"."""
        relations, m, n = self.matrix.shape
        w = (relations, self.feat_in, self.feat)
        operands = {"x": (n, self.feat_in), "grad": (m, self.feat)}
        if self.problem.edges:
            return {**operands, "w": w, "out": (self.matrix.nnz,)}
        return {**operands, "out": w, **self._values_shape}

    @property
    def sizes(self) -> dict[str, int]:
        """As of the operator."""
        return {"feat_in": self.feat_in, "feat": self.feat}

    @property
    def is_recorded(self) -> bool:
        """Gradients are not tuned."""
        return False


OPTIONS = ("feat_in", "weighted", "out_dtype")


def relational_request(
    op: str,
    matrix: Any,
    feat: Any = None,
    *,
    feat_in: int | None = None,
    weighted: bool = True,
    dtype: str | None = None,
    target: Any = "llvm",
    threads: int | None = None,
    out_dtype: str | None = None,
) -> RelationalRequest:
    """The arguments of `sparsetir.plan("rgms", ...)`, checked; raises as that does."""
    del op
    if feat is None:
        raise TypeError(
            "plan: argument 'feat': expected the number of features of Y for 'rgms', got None"
        )
    check_dtypes(dtype=dtype, out_dtype=out_dtype)
    own_in: Any = feat if feat_in is None else feat_in
    check_counts(feat=feat, feat_in=own_in, threads=threads)
    if not isinstance(weighted, bool):
        raise TypeError(f"plan: argument 'weighted': expected True or False, got {weighted!r}")
    if not isinstance(matrix, SparseTensor | RelationPattern):
        matrix = SparseTensor(matrix)
    if len(matrix.shape) != 3:
        raise ValueError(
            "plan: argument 'matrix': expected a SparseTensor by (relation, row, column) for "
            f"'rgms', got shape {matrix.shape}"
        )
    target = resolve_target(target)
    if isinstance(matrix, SparseTensor):
        own, idtype = str(matrix.dtype), idtype_for(*matrix.shape, matrix.nnz, own_in, feat)
    else:
        own, idtype = "float32", str(matrix.rows.dtype)
    problem = Rgms(dtype or (own if weighted else "float32"), idtype, weighted, out_dtype)
    threads = int(threads or default_threads())
    return RelationalRequest(matrix, problem, int(own_in), int(feat), threads, target)
