"""Requests for plans of operators along edges: messages, softmax and attention, and relational
gather-matmul-scatter."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from tvm.target import Target

from sparsetir.data.sparse_tensor import SparseMatrix, SparseTensor
from sparsetir.planning.request import (
    Request,
    adopted_matrix,
    check_counts,
    features_of,
    idtype_for,
    message,
    refuse_heads_first,
)
from sparsetir.records.task import Config
from sparsetir.runtime import pool
from sparsetir.runtime.arrays import is_array
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.operators.edge_attention import EdgeAttention
from sparsetir.schedules.operators.edge_softmax import EdgeSoftmax
from sparsetir.schedules.operators.messages import Messages
from sparsetir.schedules.operators.names import SOFTMAX
from sparsetir.schedules.operators.registry import ALONG
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.operators.rgms import RGMS, RGMS_EDGE, RGMS_WEIGHT, Rgms, RgmsGradient
from sparsetir.schedules.search.choose_rgms import tried, whole_vectors
from sparsetir.schedules.template import Branch, Choices
from sparsetir.schedules.templates.of_program import choices_near_default, default_of
from sparsetir.sparse_ir.errors import ScheduleError


class AlongEdges(Request):
    """A request whose configs are those of programs in general."""

    @property
    def _asked(self) -> tuple[Any, Mapping[str, Any], Target, int]:
        m, n = self.matrix.shape[-2:]
        pattern = {"m": m, "n": n, "nnz": self.matrix.nnz}
        return self.problem, {**self.sizes, **pattern}, self.target, self.threads

    def about(self) -> tuple[str, str, int | None]:
        problem, heads = self.problem, int(self.sizes.get("batch", self.sizes["heads"]))
        if isinstance(problem, Messages):
            kind = problem.op if problem.op.startswith("copy") else f"u_{problem.op}_e"
            op = f"{kind}_{problem.reduce}"
            about = f"{problem.reduce}-of-{problem.u or 1}-{problem.e or 1}"
            about += "-backward" * problem.backward
        elif isinstance(problem, EdgeSoftmax):
            op, about = "softmax", "backward" if problem.backward else "forward"
        else:
            assert isinstance(problem, EdgeAttention)
            op, about = "attention", f"of-{self.feat_in}" + "-heads-first" * problem.heads_first
        return op, about, heads if heads > 1 else None

    def chosen(self) -> Choices:
        return default_of(*self._asked, pool.work_of_threads())

    def tried(self) -> Branch:
        return Branch("schedule", *choices_near_default(self.chosen(), *self._asked))

    def on_gpu(self) -> list[Config]:
        return [self.chosen()]


def edge_request(
    op: str,
    matrix: Any,
    feat: Any = None,
    *,
    target: Target,
    threads: int,
    dtype: str | None = None,
    heads: int | None = None,
    **options: Any,
) -> Request:
    """See :func:`sparsetir.planning.plan.requested`."""
    operator, operand = ALONG.get(op, ALONG["messages"]), feat
    if op in SOFTMAX and not (feat is None or is_array(feat) and len(feat.shape) in (1, 2)):
        got = tuple(feat.shape) if is_array(feat) else repr(feat)
        expected = f"None for '{op}', or its operand of 1 dimension, or 2 with heads"
        raise wrong("plan", "feat", expected, got)
    feat, dtype, heads = features_of(op, feat, dtype, heads, vectors=op in SOFTMAX)
    if operator.name == "messages":
        options = _message_options(op, feat, **options)
    scale = options.get("scale")
    if scale is not None and not isinstance(scale, numbers.Real):
        raise TypeError(f"plan: argument 'scale': expected a number, got {scale!r}")
    one, fit = heads or 1, operator.fit
    assert fit is not None
    fields = fit(one, feat, **options)
    each = any("nnz" in operator.axes(name) for name in fields["there"] if name != "a")
    matrix = adopted_matrix(op, matrix, each_once=True, in_order=each)
    if op in SOFTMAX:
        refuse_heads_first(op, operand, 2, (matrix.nnz,))
    dtype = dtype or (str(matrix.dtype) if isinstance(matrix, SparseMatrix) else "float32")
    if dtype not in operator.dtypes:
        raise wrong("plan", "dtype", f"{' or '.join(operator.dtypes)} for '{op}'", f"{dtype!r}")
    idtype = idtype_for(*matrix.shape, matrix.nnz, feat, one)
    fields["problem"] = replace(fields["problem"], dtype=dtype, idtype=idtype)
    fields["callers"] = {"heads": heads, "feat": feat, **fields.get("callers", {})}
    return AlongEdges(operator, op, matrix, threads=threads, target=target, **fields)


def _message_options(
    op: str, feat: int, reduce: str = "sum", edge_feat: int | None = None
) -> dict[str, object]:
    """Options of messages in the form that their record takes."""
    default = isinstance(reduce, str) and reduce == "sum"
    kind, reduce = message("plan", op, None if default else reduce)
    if edge_feat is not None and kind == "copy_u":
        expected = f"none for '{op}', which has no features of edges"
        raise wrong("plan", "edge_feat", expected, f"{edge_feat!r}")
    if edge_feat not in (None, feat) and (kind == "copy_e" or edge_feat != 1):
        expected = f"{feat}" if kind == "copy_e" else f"1 or {feat}"
        raise wrong("plan", "edge_feat", f"{expected}, as 'feat'", f"{edge_feat!r}")
    return {"kind": kind, "reduce": reduce, "edge_feat": edge_feat}


# -- relations ------------------------------------------------------------------------------------


class OfRelations(Request):
    """A request whose configs are chosen by the rows of relations."""

    @cached_property
    def pattern(self) -> Any:
        """CSF by relation for CPUs, coordinates for GPUs."""
        if isinstance(self.matrix, RelationPattern):
            return self.matrix
        pattern = self.matrix.pattern
        return pattern if self.gpu else RelationPattern.of_pattern(pattern, self.problem.idtype)

    def check(self, config: Config) -> None:
        serves = getattr(config, "feat_in", None)
        if serves not in (None, self.feat_in):
            raise ScheduleError(
                f"plan: argument 'feat_in': the config serves {serves} features, got {self.feat_in}"
            )

    @property
    def whole(self) -> Request:
        feat_in, feat = (whole_vectors(self.problem, size, self.target) for size in self.features)
        return replace(self, **_sized(feat_in, feat, self.callers["blocks"]))

    def about(self) -> tuple[str, str, int | None]:
        weighted = "" if self.problem.weighted else "-unweighted"
        return self.name, f"sum-of-{self.feat_in}{weighted}", None

    def tried(self) -> Branch:
        pattern, (feat_in, feat) = self.pattern, self.features
        return tried(
            self.problem, len(pattern.rows), feat_in, feat, target=self.target,
            threads=self.threads, relations=pattern.shape[0], blocks=self.callers["blocks"] or 1,
            work_of_threads=pool.work_of_threads(),
        )  # fmt: skip


def relations_request(
    matrix: SparseTensor | RelationPattern,
    problem: Rgms | RgmsGradient,
    features: tuple[int, int],
    threads: int,
    target: Target,
    blocks: int | None = None,
) -> Request:
    """The request for a relational problem whose sizes are known to fit.

    matrix : by (relation, row, column); a RelationPattern without values
    features : those of X and of Y, of each block
    blocks : number of blocks of features, if the problem has any
    """
    operator = RGMS
    if isinstance(problem, RgmsGradient):
        operator = RGMS_EDGE if problem.edges else RGMS_WEIGHT
    there = (*operator.dims, *["a"] * problem.weighted)
    return OfRelations(
        operator, operator.name, matrix, problem, there=there, threads=threads, target=target,
        **_sized(*features, blocks),
    )  # fmt: skip


def _sized(feat_in: int, feat: int, blocks: int | None) -> dict[str, Any]:
    """The fields of a request that hold sizes."""
    sizes = {"feat_in": feat_in, "feat": feat, **({"blocks": blocks} if blocks else {})}
    callers = {"heads": None, "feat": feat, "feat_in": feat_in, "blocks": blocks}
    return {"features": (feat_in, feat), "sizes": sizes, "callers": callers}


def relational_request(
    op: str,
    matrix: Any,
    feat: Any = None,
    *,
    target: Target,
    threads: int,
    dtype: str | None = None,
    feat_in: int | None = None,
    weighted: bool = True,
    out_dtype: str | None = None,
) -> Request:
    """See :func:`sparsetir.planning.plan.requested`."""
    if feat is None:
        raise wrong("plan", "feat", f"the number of features of Y for '{op}'", "None", TypeError)
    check_counts(feat=feat)
    feat = int(feat)
    if not isinstance(weighted, bool):
        raise TypeError(f"plan: argument 'weighted': expected True or False, got {weighted!r}")
    if not isinstance(matrix, SparseTensor | RelationPattern):
        matrix = SparseTensor(matrix)
    if len(matrix.shape) != 3:
        expected = f"a SparseTensor by (relation, row, column) for '{op}'"
        raise wrong("plan", "matrix", expected, f"shape {matrix.shape}")
    features = feat_in or feat, feat
    if isinstance(matrix, SparseTensor):
        default_dtype, idtype = str(matrix.dtype), idtype_for(*matrix.shape, matrix.nnz, *features)
    else:
        default_dtype, idtype = "float32", str(matrix.rows.dtype)
    dtype = dtype or (default_dtype if weighted else "float32")
    problem = Rgms(dtype, idtype, weighted, out_dtype)
    return relations_request(matrix, problem, features, threads, target)
