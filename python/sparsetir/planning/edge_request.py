"""What plans of messages, softmax and attention along edges are asked for, checked."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm.target import Target

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.planning.request import (
    About,
    OneByOne,
    Request,
    adopted_matrix,
    check_counts,
    check_dtypes,
    default_threads,
    features_of,
    idtype_for,
    refuse_heads_first,
)
from sparsetir.planning.vocabulary import is_along_edges, message
from sparsetir.records.task import Config
from sparsetir.runtime.arrays import dtype_name, is_array
from sparsetir.runtime.pool import pays
from sparsetir.runtime.refusals import wrong
from sparsetir.runtime.targets import TargetLike, resolve_target
from sparsetir.schedules.operators.edge_attention import EdgeAttention
from sparsetir.schedules.operators.edge_softmax import EdgeSoftmax
from sparsetir.schedules.operators.messages import Messages
from sparsetir.schedules.operators.names import SOFTMAX
from sparsetir.schedules.operators.operands import Operator
from sparsetir.schedules.operators.problems import CsrPattern, Problem
from sparsetir.schedules.operators.registry import ALONG
from sparsetir.schedules.template import Branch
from sparsetir.schedules.templates import message_tiles
from sparsetir.schedules.templates.message_tiles import AttentionTiles, Tile


class AlongEdges(OneByOne):
    """Configs by numbers of features."""

    def check(self, wanted: Request, config: Config) -> None:
        """See :class:`Choosing`."""
        first = config.keys if isinstance(config, AttentionTiles) else config
        assert isinstance(first, Tile)  # as the template's
        if first.gpu != wanted.gpu:
            raise wrong("plan", "config", f"gpu={wanted.gpu} for {wanted.target.kind.name}", config)
        first.tiles(wanted.feat_in)

    def about(self, wanted: Request) -> About:
        """See :class:`Choosing`."""
        problem, heads = wanted.problem, _heads(wanted)
        if isinstance(problem, Messages):
            kind = problem.op if problem.op.startswith("copy") else f"u_{problem.op}_e"
            op = f"{kind}_{problem.reduce}"
            about = f"{problem.reduce}-of-{problem.u or 1}-{problem.e or 1}"
        elif isinstance(problem, EdgeSoftmax):
            op, about = "softmax", "backward" if problem.backward else "forward"
        else:
            assert isinstance(problem, EdgeAttention)
            op, about = "attention", f"of-{wanted.feat_in}" + "-heads-first" * problem.heads_first
        return About(op, about, heads if heads > 1 else None)

    def tried(self, wanted: Request) -> Branch:
        """See :class:`OneByOne`."""
        heads, features = _heads(wanted), wanted.features
        work = message_tiles.work(wanted.problem, wanted.matrix.nnz, heads, features)
        return message_tiles.tried(features, wanted.threads, pays(wanted.threads, work))

    def on_gpu(self, wanted: Request) -> list[Config]:
        """See :class:`OneByOne`."""
        return [message_tiles.chosen(wanted.features, gpu=True)]


ALONG_EDGES = AlongEdges()


def _heads(wanted: Request) -> int:
    """That are gone through by themselves."""
    return int(wanted.sizes.get("batch", wanted.sizes["heads"]))


def of_edges(
    matrix: CsrPattern,
    problem: Problem,
    features: tuple[int, ...],
    sizes: Mapping[str, int | float],
    target: Target,
) -> Request:
    """The request for a kernel whose caller has arrays of its own, which are known to fit.

    features, sizes : see :class:`Request`
    """
    return Request(
        ALONG["messages"], "messages", matrix, problem, features, sizes, {}, (), default_threads(),
        target, ALONG_EDGES,
    )  # fmt: skip


def record_along_edges(
    op: object, feat: Any = None, heads: object = None, edge_feat: object = None
) -> Operator | None:
    """The record of the operator along edges that a name with these arguments is for.

    A product that is a message is "spmm", unless it has heads or features of edges.
    """
    batched = heads is not None or (is_array(feat) and len(feat.shape) > 2)
    if not is_along_edges(op, more=batched or edge_feat is not None):
        return None
    return ALONG.get(str(op), ALONG["messages"])


def edge_request(
    op: str,
    matrix: Any,
    feat: Any = None,
    *,
    dtype: str | None = None,
    heads: int | None = None,
    target: TargetLike = "llvm",
    threads: int | None = None,
    **options: Any,
) -> Request:
    """The arguments of `sparsetir.plan("u_add_e_max", ...)` and the like, checked; raises as that
    does."""
    operator, given = ALONG.get(op, ALONG["messages"]), feat
    if op in SOFTMAX:
        feat, dtype, heads = _of_values(op, feat, dtype, heads)
    else:
        feat, dtype, heads = features_of(op, feat, dtype, heads)
    check_dtypes(dtype=dtype)
    check_counts(feat=feat, heads=heads, threads=threads, **_counts(options))
    if operator.name == "messages":
        options = _of_messages(op, feat, **options)
    scale = options.get("scale")
    if scale is not None and not isinstance(scale, numbers.Real):
        raise TypeError(f"plan: argument 'scale': expected a number, got {scale!r}")
    one, fit, threads = heads or 1, operator.fit, int(threads or default_threads())
    assert fit is not None
    by_sizes = fit("float32", "int32", one, feat, **options)  # the types follow
    each = any("e" in operator.dims[name] for name in by_sizes.there if name != "a")
    matrix = adopted_matrix(op, matrix, each_once=True, in_order=each)
    if op in SOFTMAX:
        refuse_heads_first(op, given, 2, (matrix.nnz,))
    dtype = dtype or (str(matrix.dtype) if isinstance(matrix, SparseMatrix) else "float32")
    if dtype not in operator.dtypes:
        raise wrong("plan", "dtype", f"{' or '.join(operator.dtypes)} for '{op}'", f"{dtype!r}")
    idtype = idtype_for(*matrix.shape, matrix.nnz, feat, one)
    problem: Any = by_sizes.problem
    problem = replace(problem, dtype=dtype, idtype=idtype)
    callers = {"heads": heads, "feat": feat, **by_sizes.sizes}
    return Request(
        operator, op, matrix, problem, by_sizes.features, by_sizes.numbers, callers,
        by_sizes.there, threads, resolve_target(target), ALONG_EDGES,
    )  # fmt: skip


def _counts(options: dict[str, object]) -> dict[str, object]:
    """Options that are numbers of features, where they are given."""
    names = ("edge_feat", "feat_in")
    return {n: options[n] for n in names if options.get(n) is not None}


def _of_messages(
    op: str, feat: int, reduce: str = "sum", edge_feat: int | None = None
) -> dict[str, object]:
    """Options of messages, as their record takes them."""
    kind, reduce = message("plan", op, None if reduce == "sum" else reduce)
    if edge_feat is not None and kind == "copy_u":
        expected = f"none for '{op}', which has no features of edges"
        raise wrong("plan", "edge_feat", expected, f"{edge_feat!r}")
    if edge_feat not in (None, feat) and (kind == "copy_e" or edge_feat != 1):
        expected = f"{feat}" if kind == "copy_e" else f"1 or {feat}"
        raise wrong("plan", "edge_feat", f"{expected}, as 'feat'", f"{edge_feat!r}")
    return {"kind": kind, "reduce": reduce, "edge_feat": edge_feat}


def _of_values(
    op: str, x: Any, dtype: str | None, heads: int | None
) -> tuple[int, str | None, int | None]:
    """What the values of a softmax say, where they are given for their number of features."""
    if x is None:
        return 1, dtype, heads
    if not is_array(x) or len(x.shape) not in (1, 2):
        got = tuple(x.shape) if is_array(x) else repr(x)
        raise wrong(
            "plan", "feat", f"None for '{op}', or its operand of 1 dimension, or 2 with heads", got
        )
    if heads is None and len(x.shape) == 2:
        heads = int(x.shape[1])
    return 1, dtype or dtype_name(x), heads
