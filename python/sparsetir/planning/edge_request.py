"""What plans of messages, softmax and attention along edges are asked for, checked."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.planning.request import (
    Request,
    adopted_matrix,
    check_counts,
    check_dtypes,
    csr_pattern,
    default_threads,
    features_of,
    idtype_for,
)
from sparsetir.planning.vocabulary import SOFTMAX, is_along_edges, message
from sparsetir.records.task import Task
from sparsetir.runtime.arrays import dtype_name, is_array
from sparsetir.runtime.pool import pays
from sparsetir.runtime.signature import Signature
from sparsetir.runtime.targets import resolve_target
from sparsetir.schedules.operators.edge_attention import EdgeAttention
from sparsetir.schedules.operators.edge_softmax import EdgeSoftmax
from sparsetir.schedules.operators.messages import Messages
from sparsetir.schedules.operators.names import DTYPES
from sparsetir.schedules.operators.operands import rounded
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.schedules.search.spaces import Space
from sparsetir.schedules.template import Template
from sparsetir.schedules.templates import message_tiles
from sparsetir.schedules.templates.message_tiles import AttentionTiles
from sparsetir.schedules.templates.registry import template_of
from sparsetir.sparse_ir.lower_sparse_iter import lower_sparse_iter
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.position_space import SIGNATURE

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class EdgeRequest(Request):
    """Messages, softmax or attention on a matrix; :func:`edge_request` makes it.

    name : of the operator, as it was asked for
    asked : the operator and its options
    matrix : a CsrPattern where there are no values
    problem : Messages, EdgeSoftmax or EdgeAttention
    features : that tiles are of, as of :func:`sparsetir.schedules.templates.message_tiles.chosen`
    shapes : of operands, of values "a" if they play a part, and of the result "out"
    sizes : beside those of the pattern, by the names of the operator's parameters; other numbers
    threads : of the CPU
    """

    name: str
    asked: Any
    matrix: SparseMatrix | CsrPattern
    problem: Any
    features: tuple[int, ...]
    shapes: Shapes
    sizes: Mapping[str, Any]
    threads: int
    target: Any

    @property
    def function(self) -> str:
        """See :class:`Request`."""
        return self.asked.function

    @property
    def feat(self) -> int:
        """Of the result; of softmax the values of an element that lie side by side."""
        return self.features[-1]

    @property
    def pattern(self) -> CsrPattern:
        """Where the matrix has elements, in the type of the problem."""
        return csr_pattern(self.matrix, self.problem.idtype)

    @property
    def program(self) -> SparseFunc:
        """The operator as a stage-I function."""
        return template_of(self.chosen(), self.problem, self.gpu).program(self.problem)

    @property
    def scratch(self) -> Mapping[str, tuple[int, str]]:
        """Elements and type of the arrays that a kernel has for its own use, by parameter."""
        if not isinstance(self.problem, EdgeAttention):
            return {}
        return {"scores": (self._heads * self.matrix.nnz, self.problem.accumulator)}

    def template(self, config: Any) -> Template:
        """See :class:`Request`; raises ScheduleError for features that it does not serve."""
        found = super().template(config)
        first = config.keys if isinstance(config, AttentionTiles) else config
        if first.gpu != self.gpu:
            raise ValueError(
                f"plan: argument 'config': expected gpu={self.gpu} for {self.target.kind.name}, "
                f"got {config}"
            )
        first.tiles(self.features[0])
        return found

    def task(self) -> Task:
        """What records of tuning are looked up by."""
        return edge_task(
            self.problem, self.matrix, self.features, self._heads, self.target, self.threads
        )

    def chosen(self) -> Any:
        """The config of a plan whose user names none."""
        return message_tiles.chosen(self.features, self.threads if self._pays else 1, self.gpu)

    def space(self) -> Space:
        """What a search on a CPU tries, the first values those of :meth:`chosen`."""
        return Space((message_tiles.tried(self.features, self.threads, self._pays),))

    def candidates(self) -> list[Any]:
        """See :class:`Request`."""
        return [self.chosen()] if self.gpu else self.space().branches[0].one_by_one()

    @property
    def is_recorded(self) -> bool:
        """See :class:`Request`; on CPUs."""
        return self.has_values and not self.gpu

    def of_choices(self, **choices: Any) -> Any:
        """See :class:`Request`."""
        return message_tiles.config_of(**choices)

    def arguments(self) -> dict[str, Any]:
        """Of the plain program, with random operands, but what it writes."""
        rng, dtype = np.random.default_rng(0), self.problem.dtype
        signature = Signature(lower_sparse_iter(self.program).attrs[SIGNATURE])
        pattern = self.pattern.arguments()
        known = {**pattern, **self.sizes}
        found = {name: known[name] for name in signature.names if name in known}
        given = [found.get(name) for name in signature.names]
        for i in signature.arrays:
            name = signature.names[i]
            if name not in pattern and i not in signature.outputs:
                shape = signature.expected_shape(i, given)
                # Far enough from zero to divide by.
                drawn = rng.uniform(0.5, 1, shape) * rng.choice([-1, 1], shape)
                found[name] = rounded(drawn, dtype).astype(dtype)
        return found

    @property
    def _heads(self) -> int:
        """That are gone through by themselves."""
        return int(self.sizes.get("batch", self.sizes["heads"]))

    @property
    def _pays(self) -> bool:
        """Whether to wake the other threads of a CPU."""
        work = message_tiles.work(self.problem, self.matrix.nnz, self._heads, self.features)
        return not self.gpu and pays(self.threads, work)


def edge_task(
    problem: Any, matrix: Any, features: tuple[int, ...], heads: int, target: Any, threads: int
) -> Task:
    """What records of an operator along edges are looked up by, in plans and in `sparsetir.ops`.

    matrix : a SparseMatrix, a pattern, or its sizes
    features : see :class:`EdgeRequest`
    heads : that are gone through by themselves
    """
    if isinstance(problem, Messages):
        kind = problem.op if problem.op.startswith("copy") else f"u_{problem.op}_e"
        op = f"{kind}_{problem.reduce}"
        about = f"{problem.reduce}-of-{problem.u or 1}-{problem.e or 1}"
    elif isinstance(problem, EdgeSoftmax):
        op, about = "softmax", "backward" if problem.backward else "forward"
    else:
        op, about = "attention", f"of-{features[0]}" + "-heads-first" * problem.heads_first
    return Task(
        op, matrix, features[-1], problem.dtype, about, heads if heads > 1 else None, target,
        threads,
    )  # fmt: skip


# -- the operators ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Messages:
    """Messages and their reduction.

    edge_feat : of features of edges; None for values of the matrix
    """

    op: str
    reduce: str
    edge_feat: int | None
    function = "gspmm"

    @property
    def per_edge(self) -> bool:
        return self.op != "copy_u" and (self.op == "copy_e" or self.edge_feat is not None)

    def problem(self, dtype: str, idtype: str, heads: int, feat: int) -> Messages:
        heads, (both,) = self._heads(heads, feat), self.features(heads, feat)
        h, f = "h" * (heads > 1), "f" * (both > 1)
        u = "" if self.op == "copy_e" else h + f
        of_edges = "" if self._edge_feat(feat) < feat else f
        return Messages(self.op, self.reduce, u, h + of_edges * self.per_edge, dtype, idtype)

    def features(self, heads: int, feat: int) -> tuple[int, ...]:
        return (heads * feat // self._heads(heads, feat),)

    def shapes(self, matrix: Any, heads: int | None, feat: int) -> Shapes:
        (m, n), h = matrix.shape, _heads(heads)
        operands: Shapes = {} if self.op == "copy_e" else {"u": (n, *h, feat)}
        if self.per_edge:
            operands["e"] = (matrix.nnz, *h, self._edge_feat(feat))
        elif self.op != "copy_u":
            operands["a"] = (matrix.nnz,)
        return {**operands, "out": (m, *h, feat)}

    def sizes(self, heads: int, feat: int) -> dict[str, Any]:
        return {"heads": self._heads(heads, feat), "feat": self.features(heads, feat)[0]}

    def _heads(self, heads: int, feat: int) -> int:
        """Those of the kernel: more than one only where edges have one number for each."""
        return heads if self._edge_feat(feat) < feat else 1

    def _edge_feat(self, feat: int) -> int:
        return self.edge_feat or feat


@dataclass(frozen=True)
class _Softmax:
    """Softmax of rows; heads_first : as `ops.sparse_softmax` has heads, else `ops.edge_softmax`."""

    heads_first: bool
    per_edge = True

    @property
    def function(self) -> str:
        return "sparse_softmax" if self.heads_first else "edge_softmax"

    def problem(self, dtype: str, idtype: str, heads: int, feat: int) -> EdgeSoftmax:
        return EdgeSoftmax(dtype, idtype)

    def features(self, heads: int, feat: int) -> tuple[int, ...]:
        return (1 if self.heads_first else heads,)

    def shapes(self, matrix: Any, heads: int | None, feat: int) -> Shapes:
        h, nnz = _heads(heads), matrix.nnz
        shape = (*h, nnz) if self.heads_first else (nnz, *h)
        return {"x": shape, "out": shape}

    def sizes(self, heads: int, feat: int) -> dict[str, Any]:
        return {"batch": heads, "heads": 1} if self.heads_first else {"batch": 1, "heads": heads}


@dataclass(frozen=True)
class _Attention:
    """Attention; feat_in : of queries and keys, by default those of values."""

    feat_in: int | None
    scale: float | None
    function = "attention"
    per_edge = False

    def problem(self, dtype: str, idtype: str, heads: int, feat: int) -> EdgeAttention:
        return EdgeAttention(dtype, idtype)

    def features(self, heads: int, feat: int) -> tuple[int, ...]:
        return (self.feat_in or feat, feat)

    def shapes(self, matrix: Any, heads: int | None, feat: int) -> Shapes:
        (m, n), h, of_keys = matrix.shape, _heads(heads), self.feat_in or feat
        operands = {"q": (m, *h, of_keys), "k": (n, *h, of_keys), "v": (n, *h, feat)}
        return {**operands, "out": (m, *h, feat)}

    def sizes(self, heads: int, feat: int) -> dict[str, Any]:
        of_keys = self.feat_in or feat
        scale = 1 / math.sqrt(of_keys) if self.scale is None else float(self.scale)
        return {"heads": heads, "feat": of_keys, "width": feat, "scale": scale}


def _heads(heads: int | None) -> tuple[int, ...]:
    return () if heads is None else (heads,)


# -- arguments ----------------------------------------------------------------------------------


def along_edges(op: Any, feat: Any, heads: Any, edge_feat: Any) -> bool:
    """Whether it is :func:`edge_request` that takes the name of an operator with these arguments.

    A product that is a message is "spmm", unless it has heads or features of edges.
    """
    batched = heads is not None or (is_array(feat) and len(feat.shape) > 2)
    return is_along_edges(op, more=batched or edge_feat is not None)


def options_of(op: str) -> tuple[str, ...]:
    """The options that an operator along edges has."""
    if op in SOFTMAX:
        return ("heads",)
    return ("heads", "feat_in", "scale") if op == "attention" else ("heads", "reduce", "edge_feat")


def edge_request(
    op: str,
    matrix: Any,
    feat: Any = None,
    *,
    edge_feat: int | None = None,
    feat_in: int | None = None,
    scale: float | None = None,
    dtype: str | None = None,
    reduce: str = "sum",
    heads: int | None = None,
    target: Any = "llvm",
    threads: int | None = None,
) -> EdgeRequest:
    """The arguments of `sparsetir.plan("u_add_e_max", ...)` and the like, checked; raises as that
    does."""
    softmax, attention = op in SOFTMAX, op == "attention"
    if softmax:
        feat, dtype, heads = _of_values(op, feat, dtype, heads)
    else:
        feat, dtype, heads = features_of(op, feat, dtype, heads, heads_at=1)
    check_dtypes(dtype=dtype)
    check_counts(feat=feat, heads=heads, threads=threads)
    asked: Any
    if softmax:
        asked = _Softmax(op != "edge_softmax")
    elif attention:
        if feat_in is not None:
            check_counts(feat_in=feat_in)
        if scale is not None and not isinstance(scale, numbers.Real):
            raise TypeError(f"plan: argument 'scale': expected a number, got {scale!r}")
        asked = _Attention(feat_in, scale)
    else:
        asked = _messages(op, reduce, edge_feat, feat)
    matrix = adopted_matrix(op, matrix, each_once=True, in_order=asked.per_edge)
    dtype = dtype or (str(matrix.dtype) if isinstance(matrix, SparseMatrix) else "float32")
    known = ("float32", "float64") if softmax else DTYPES
    if dtype not in known:
        raise ValueError(
            f"plan: argument 'dtype': expected {' or '.join(known)} for '{op}', got {dtype!r}"
        )
    one = heads or 1
    idtype = idtype_for(*matrix.shape, matrix.nnz, feat, one)
    return EdgeRequest(
        op, asked, matrix, asked.problem(dtype, idtype, one, feat),
        asked.features(one, feat), asked.shapes(matrix, heads, feat), asked.sizes(one, feat),
        int(threads or default_threads()), resolve_target(target),
    )  # fmt: skip


def _messages(op: str, reduce: str, edge_feat: Any, feat: int) -> _Messages:
    kind, reduce = message("plan", op, None if reduce == "sum" else reduce)
    if edge_feat is None:
        return _Messages(kind, reduce, None)
    check_counts(edge_feat=edge_feat)
    if kind == "copy_u":
        raise ValueError(
            f"plan: argument 'edge_feat': expected none for '{op}', which has no features of "
            f"edges, got {edge_feat!r}"
        )
    if edge_feat not in ((feat,) if kind == "copy_e" else (1, feat)):
        expected = f"{feat}" if kind == "copy_e" else f"1 or {feat}"
        raise ValueError(
            f"plan: argument 'edge_feat': expected {expected}, as 'feat', got {edge_feat!r}"
        )
    return _Messages(kind, reduce, int(edge_feat))


def _of_values(
    op: str, x: Any, dtype: str | None, heads: int | None
) -> tuple[int, str | None, int | None]:
    """What the values of a softmax say, where they are given for their number of features."""
    if x is None:
        return 1, dtype, heads
    if not is_array(x) or len(x.shape) not in (1, 2):
        got = tuple(x.shape) if is_array(x) else repr(x)
        raise ValueError(
            f"plan: argument 'feat': expected None for '{op}', or its operand of 1 dimension, or 2 "
            f"with heads, got {got}"
        )
    if heads is None and len(x.shape) == 2:
        heads = int(x.shape[1 if op == "edge_softmax" else 0])
    return 1, dtype or dtype_name(x), heads
