"""Relational gather-matmul-scatter as a torch operator, with gradients of all orders.

Gradients use the operator itself, along edges or against them, and two more: those for the weights
of relations and of edges. All are linear in each operand, so that these three serve gradients of
gradients, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from sparsetir.ops import rgms_kernels
from sparsetir.ops.prepared import PreparedRelations
from sparsetir.ops.registry import Gradients, Operation, Operator
from sparsetir.ops.relations import Relations, edge_copies, relations_of
from sparsetir.ops.tensors import check_size, check_strided, check_tensor
from sparsetir.planning.request import reduction
from sparsetir.reductions import LINEAR, REDUCERS
from sparsetir.runtime.refusals import wrong

NAME = "rgms"


def rgms(
    x: Tensor,
    weight: Tensor,
    edge_index: Tensor | PreparedRelations,
    edge_type: Tensor | None = None,
    edge_weight: Tensor | None = None,
    reduce: str = "sum",
    num_targets: int | None = None,
) -> Tensor:
    """Y[i] = sum over edges e = (j -> i) of relation r of edge_weight[e] * x[j] @ weight[r].

    Parameters
    ----------
    x : (n, feat_in) Tensor
        Features of sources; float16, bfloat16, float32 or float64.
    weight : (relations, feat_in, feat) Tensor
        Matrices of x's dtype; or, for block-diagonal matrices, their blocks, (relations, blocks,
        feat_in / blocks, feat / blocks).
    edge_index : (2, E) Tensor, int32 or int64
        Sources, then targets, in any order; parallel edges and self loops are allowed. Or a result
        of :func:`prepare` for edges with relations, which includes `edge_type`.
    edge_type : (E,) Tensor, int32 or int64, optional
        Relation of each edge.
    edge_weight : (E,) Tensor, optional
        Weights of x's dtype; by default ones.
    reduce : {"sum", "mean"}
        "mean" divides each relation's sum at a target by the number of the target's edges in that
        relation, as in an RGCN.
    num_targets : int, optional
        Number of targets; by default that of sources.

    Returns
    -------
    (num_targets, feat) Tensor
        Targets without edges get zeros. Differentiable with respect to x, weight and edge_weight
        any number of times.

    Raises
    ------
    TypeError, ValueError, StructureError
        For an invalid argument, which the message names.

    Notes
    -----
    No array has features for each edge, nor in the gradients. Sums are in float32, or float64 for
    float64. On a CPU results are the same in each run. On a GPU kernels add to results atomically,
    in any order, and tensor cores round the sums that rows gather to 16 bits; features in blocks
    are computed block by block there. (SparseTIR, section 4.4.)

    Arrays for kernels are made when a graph is first seen, and cached like those of patterns: see
    :func:`sparsetir.ops.structure_of`. Each call compares `edge_index` and `edge_type` with copies.
    """
    reduce = reduction(NAME, reduce, LINEAR)
    if isinstance(edge_index, PreparedRelations):
        if edge_type is not None:
            raise TypeError(f"{NAME}: argument 'edge_type': expected None for prepared relations")
        num_targets = edge_index.m if num_targets is None else num_targets
        if isinstance(x, Tensor) and isinstance(weight, Tensor) and x.dim() and weight.dim():
            edge_index.edges_for(NAME, x.shape[0], num_targets, weight.shape[0])
        edge_index, edge_type = edge_index.edge_index, edge_index.edge_type
    _check(x, weight, edge_index, edge_type, edge_weight)
    n = x.shape[0]
    m = n if num_targets is None else check_size(NAME, "num_targets", num_targets)
    assert edge_type is not None
    edge_index, edge_type = edge_copies(edge_index, edge_type)
    mean = REDUCERS[reduce].is_scaled
    return rgms_sum(x, weight, edge_index, edge_type, edge_weight, n, m, mean, False)


def _check(
    x: Tensor,
    weight: Tensor,
    edge_index: Tensor,
    edge_type: Tensor | None,
    edge_weight: Tensor | None,
) -> None:
    """Raise unless operands fit each other; graphs are checked when they are first seen."""
    check_tensor(NAME, "x", x)
    check_tensor(NAME, "weight", weight, like=x)
    if x.dim() != 2:
        raise wrong(NAME, "x", "shape (n, feat_in)", tuple(x.shape))
    if weight.dim() not in (3, 4) or prod(weight.shape[1:-1]) != x.shape[1]:
        raise ValueError(
            f"{NAME}: argument 'weight': expected shape (relations, {x.shape[1]}, feat), or "
            f"(relations, blocks, rows, columns) with {x.shape[1]} rows in all, as 'x' has "
            f"{x.shape[1]} features, got {tuple(weight.shape)}"
        )
    for name, tensor in (("edge_index", edge_index), ("edge_type", edge_type)):
        check_strided(NAME, name, tensor, "a dense tensor")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise wrong(NAME, "edge_index", "shape (2, E)", tuple(edge_index.shape))
    if edge_weight is not None:
        check_tensor(NAME, "edge_weight", edge_weight, like=x)
        if edge_weight.shape != edge_index.shape[1:]:
            raise wrong(
                NAME,
                "edge_weight",
                f"shape {tuple(edge_index.shape[1:])}",
                tuple(edge_weight.shape),
            )
    others = {"weight": weight, "edge_index": edge_index, "edge_weight": edge_weight}
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise wrong(NAME, name, f"to be on {x.device} as 'x'", tensor.device)


def _counts(weight: Tensor) -> tuple[int, int]:
    """Numbers of relations and of blocks of features, 0 without blocks."""
    return weight.shape[0], weight.shape[1] if weight.dim() == 4 else 0


def _values(
    relations: Relations,
    edge_weight: Tensor | None,
    mean: bool,
    dtype: torch.dtype,
    transposed: bool,
) -> Tensor | None:
    """(E,) values of the elements, in the type that kernels compute in."""
    wide = torch.promote_types(dtype, torch.float32)
    if edge_weight is None:
        return relations.shares(wide, transposed) if mean else None
    values = relations.rows(transposed).arranged(edge_weight.to(wide))
    return values * relations.shares(wide, transposed) if mean else values


@dataclass
class Rgms(Operation[Tensor]):
    """Sums at targets; if `transposed`, sums at sources of x (m, feat_in) at targets."""

    x: Tensor
    weight: Tensor
    edge_index: Tensor
    edge_type: Tensor
    edge_weight: Tensor | None
    n: int
    m: int
    mean: bool
    transposed: bool

    def run(self) -> Tensor:
        graph = self.edge_index, self.edge_type, self.n, self.m, self.weight.shape[0]
        relations = relations_of(*graph, NAME)
        values = _values(relations, self.edge_weight, self.mean, self.x.dtype, self.transposed)
        return rgms_kernels.node_sums(relations, self.x, self.weight, values, self.transposed)

    def fake(self) -> Tensor:
        feat = prod(self.weight.shape[1:-2]) * self.weight.shape[-1]
        return self.x.new_empty((self.n if self.transposed else self.m, feat))

    def gradients(self, grad: Tensor) -> Gradients:
        graph, by, back = (self.edge_index, self.edge_type), self.edge_weight, self.transposed
        x, weight, turned, mean = self.x, self.weight, self.weight.mT, self.mean
        # Features of sources, then of targets.
        ends = (grad, x) if back else (x, grad)

        def for_weight() -> Tensor:
            out = rgms_weight(*ends, *graph, by, *_counts(weight), mean)
            return out.mT if back else out

        return {
            "x": lambda: rgms_sum(grad, turned, *graph, by, self.n, self.m, mean, not back),
            "weight": for_weight,
            "edge_weight": lambda: rgms_edge(*ends, turned if back else weight, *graph, mean),
        }


rgms_sum = Operator("rgms", Rgms)


@dataclass
class RgmsWeight(Operation[Tensor]):
    """Gradients for the weights of relations, by :func:`.rgms_kernels.weight_gradients`."""

    x: Tensor
    grad: Tensor
    edge_index: Tensor
    edge_type: Tensor
    edge_weight: Tensor | None
    count: int
    blocks: int
    mean: bool

    def run(self) -> Tensor:
        x, grad = self.x, self.grad
        sizes = x.shape[0], grad.shape[0], self.count
        relations = relations_of(self.edge_index, self.edge_type, *sizes, NAME)
        values = _values(relations, self.edge_weight, self.mean, x.dtype, False)
        return rgms_kernels.weight_gradients(relations, x, grad, values, self.blocks)

    def fake(self) -> Tensor:
        count, blocks, sizes = self.count, self.blocks, (self.x.shape[1], self.grad.shape[1])
        each = (blocks, *(size // blocks for size in sizes)) if blocks else sizes
        return self.x.new_empty((count, *each))

    def gradients(self, grad: Tensor) -> Gradients:
        graph = self.edge_index, self.edge_type, self.edge_weight
        sizes = self.x.shape[0], self.grad.shape[0], self.mean
        edges = self.edge_index, self.edge_type, self.mean
        return {
            "x": lambda: rgms_sum(self.grad, grad.mT, *graph, *sizes, True),
            "grad": lambda: rgms_sum(self.x, grad, *graph, *sizes, False),
            "edge_weight": lambda: rgms_edge(self.x, self.grad, grad, *edges),
        }


rgms_weight = Operator("rgms_weight", RgmsWeight)


@dataclass
class RgmsEdge(Operation[Tensor]):
    """Gradients for the weights of edges: see :func:`sparsetir.ops.rgms_kernels.edge_products`."""

    x: Tensor
    grad: Tensor
    weight: Tensor
    edge_index: Tensor
    edge_type: Tensor
    mean: bool

    def run(self) -> Tensor:
        x, grad, weight = self.x, self.grad, self.weight
        sizes = x.shape[0], grad.shape[0], weight.shape[0]
        relations = relations_of(self.edge_index, self.edge_type, *sizes, NAME)
        out = rgms_kernels.edge_products(relations, x, weight, grad)
        if self.mean:
            out = out * relations.shares(out.dtype, False)
        return relations.by_target.restored(out).to(x.dtype)

    def fake(self) -> Tensor:
        return self.x.new_empty(self.edge_index.shape[1:])

    def gradients(self, grad: Tensor) -> Gradients:
        x, ends, weight, mean = self.x, self.grad, self.weight, self.mean
        graph, sizes = (self.edge_index, self.edge_type, grad), (x.shape[0], ends.shape[0], mean)
        return {
            "x": lambda: rgms_sum(ends, weight.mT, *graph, *sizes, True),
            "grad": lambda: rgms_sum(x, weight, *graph, *sizes, False),
            "weight": lambda: rgms_weight(x, ends, *graph, *_counts(weight), mean),
        }


rgms_edge = Operator("rgms_edge", RgmsEdge)
