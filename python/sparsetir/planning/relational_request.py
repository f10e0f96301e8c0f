"""What plans of relational gather-matmul-scatter are asked for, checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm.target import Target

from sparsetir.data.sparse_tensor import SparseTensor
from sparsetir.planning.request import (
    About,
    OneByOne,
    Request,
    check_counts,
    check_dtypes,
    default_threads,
    idtype_for,
)
from sparsetir.records.task import Config
from sparsetir.runtime import pool
from sparsetir.runtime.refusals import wrong
from sparsetir.runtime.targets import TargetLike, resolve_target
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.operators.rgms import RGMS, Rgms
from sparsetir.schedules.operators.rgms_gradients import RGMS_EDGE, RGMS_WEIGHT, RgmsGradient
from sparsetir.schedules.search.choose_rgms import tried, whole_vectors
from sparsetir.schedules.template import Branch
from sparsetir.schedules.templates.registry import templates_for
from sparsetir.sparse_ir.errors import ScheduleError


class OfRelations(OneByOne):
    """Configs by the rows of relations."""

    def check(self, wanted: Request, config: Config) -> None:
        """See :class:`Choosing`."""
        serves = getattr(config, "feat_in", None)
        if serves not in (None, wanted.feat_in):
            raise ScheduleError(
                f"plan: argument 'feat_in': the config serves {serves} features, got "
                f"{wanted.feat_in}"
            )

    def whole(self, wanted: Request) -> Request:
        """See :class:`Choosing`."""
        target, problem = wanted.target, wanted.problem
        feat_in, feat = (whole_vectors(problem, size, target) for size in wanted.features)
        return replace(wanted, **_sized(feat_in, feat, wanted.callers["b"]))

    def about(self, wanted: Request) -> About:
        """See :class:`Choosing`."""
        weighted = "" if wanted.problem.weighted else "-unweighted"
        return About(wanted.name, f"sum-of-{wanted.feat_in}{weighted}", None)

    def tried(self, wanted: Request) -> Branch:
        """See :class:`OneByOne`."""
        pattern, (feat_in, feat) = wanted.pattern, wanted.features
        return tried(
            wanted.problem, len(pattern.rows), feat_in, feat, target=wanted.target,
            threads=wanted.threads, relations=pattern.shape[0], blocks=wanted.callers["b"] or 1,
            work_of_threads=pool.work_of_threads(),
        )  # fmt: skip

    def on_gpu(self, wanted: Request) -> list[Config]:
        """See :class:`OneByOne`."""
        asked = wanted.problem, wanted.pattern, wanted, wanted.target
        found = (t.configs(*asked) for t in templates_for(wanted.problem, True) if t.configs)
        return [config for each in found for config in each]


OF_RELATIONS = OfRelations()


def of_relations(
    matrix: SparseTensor | RelationPattern,
    problem: Rgms | RgmsGradient,
    features: tuple[int, int],
    threads: int,
    target: Target,
    blocks: int | None = None,
) -> Request:
    """The request for what is known to fit.

    matrix : by (relation, row, column); a RelationPattern where there are no values
    features : of X and of Y, of each block
    blocks : of features, where the problem has them in blocks
    """
    operator = RGMS
    if isinstance(problem, RgmsGradient):
        operator = RGMS_EDGE if problem.edges else RGMS_WEIGHT
    there = (*operator.dims, *["a"] * problem.weighted)
    return Request(
        operator, operator.name, matrix, problem, there=there, threads=threads, target=target,
        choosing=OF_RELATIONS, **_sized(*features, blocks),
    )  # fmt: skip


def _sized(feat_in: int, feat: int, blocks: int | None) -> dict[str, Any]:
    """Fields of a request that say sizes."""
    sizes = {"feat_in": feat_in, "feat": feat, **({"blocks": blocks} if blocks else {})}
    callers = {"heads": None, "feat": feat, "i": feat_in, "b": blocks}
    return {"features": (feat_in, feat), "sizes": sizes, "callers": callers}


def relational_request(
    op: str,
    matrix: Any,
    feat: Any = None,
    *,
    feat_in: int | None = None,
    weighted: bool = True,
    dtype: str | None = None,
    target: TargetLike = "llvm",
    threads: int | None = None,
    out_dtype: str | None = None,
) -> Request:
    """The arguments of `sparsetir.plan("rgms", ...)`, checked; raises as that does."""
    if feat is None:
        raise wrong("plan", "feat", f"the number of features of Y for '{op}'", "None", TypeError)
    check_dtypes(dtype=dtype, out_dtype=out_dtype)
    own_in: Any = feat if feat_in is None else feat_in
    check_counts(feat=feat, feat_in=own_in, threads=threads)
    if not isinstance(weighted, bool):
        raise TypeError(f"plan: argument 'weighted': expected True or False, got {weighted!r}")
    if not isinstance(matrix, SparseTensor | RelationPattern):
        matrix = SparseTensor(matrix)
    if len(matrix.shape) != 3:
        expected = f"a SparseTensor by (relation, row, column) for '{op}'"
        raise wrong("plan", "matrix", expected, f"shape {matrix.shape}")
    if isinstance(matrix, SparseTensor):
        own, idtype = str(matrix.dtype), idtype_for(*matrix.shape, matrix.nnz, own_in, feat)
    else:
        own, idtype = "float32", str(matrix.rows.dtype)
    problem = Rgms(dtype or (own if weighted else "float32"), idtype, weighted, out_dtype)
    threads, features = int(threads or default_threads()), (int(own_in), int(feat))
    return of_relations(matrix, problem, features, threads, resolve_target(target))
