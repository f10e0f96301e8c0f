"""Relational gather-matmul-scatter as a torch operator, with gradients of all orders.

What the gradients are made of are the operator itself, along edges or against them, and two more:
those for the weights of relations and of edges. All are linear in each operand, so that these three
serve gradients of gradients, too.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from sparsetir.ops import rgms_kernels
from sparsetir.ops.check_pattern import check_size
from sparsetir.ops.checks import check_tensor
from sparsetir.ops.prepared import PreparedRelations
from sparsetir.ops.registry import define, save_inputs, saved
from sparsetir.ops.relations import Relations, relations_of, seen_edges
from sparsetir.planning.vocabulary import reduction

WHO = "rgms"
REDUCTIONS = ("sum", "mean")


def rgms(
    x: Tensor, weight: Tensor, edge_index: Tensor | PreparedRelations,
    edge_type: Tensor | None = None, edge_weight: Tensor | None = None, reduce: str = "sum",
    num_targets: int | None = None,
) -> Tensor:  # fmt: skip
    """Y[i] = sum over edges e = (j -> i) of relation r of edge_weight[e] * x[j] @ weight[r].

    Parameters
    ----------
    x : (n, feat_in) Tensor
        Features of sources; float16, bfloat16, float32 or float64.
    weight : (relations, feat_in, feat) Tensor
        Of x's dtype; or (relations, blocks, feat_in / blocks, feat / blocks) of matrices that have
        blocks on the diagonal, and zeros elsewhere.
    edge_index : (2, E) Tensor, int32 or int64
        Sources, then targets, in any order; several edges may have the same ends, and a node may
        have one to itself. Or what :func:`prepare` gives of edges with relations, without
        `edge_type`, which it has.
    edge_type : (E,) Tensor, int32 or int64, optional
        Relation of each edge.
    edge_weight : (E,) Tensor, optional
        Of x's dtype; by default ones.
    reduce : {"sum", "mean"}
        "mean" divides what a target gets of a relation by the number of its edges in that relation,
        as in an RGCN.
    num_targets : int, optional
        How many there are; by default as many as sources.

    Returns
    -------
    (num_targets, feat) Tensor
        Targets without edges get zeros. Differentiable with respect to x, weight and edge_weight
        any number of times.

    Raises
    ------
    TypeError, ValueError, StructureError
        Naming the argument.

    Notes
    -----
    No array has features for each edge, in the gradients neither. Sums are in float32, for float64
    in float64. On a CPU results are the same in each run. On a GPU kernels add to results
    atomically, in any order, and tensor cores round what rows gather to 16 bits; features in blocks
    are computed block by block there. (SparseTIR, section 4.4.)

    What kernels want of a graph is made when it is first seen, and kept as that of patterns is: see
    :func:`sparsetir.ops.structure_of`. Each call compares `edge_index` and `edge_type` with copies.
    """
    reduce = reduction(WHO, reduce, REDUCTIONS)
    if isinstance(edge_index, PreparedRelations):
        if edge_type is not None:
            raise TypeError(f"{WHO}: argument 'edge_type': expected None beside what was prepared")
        num_targets = edge_index.m if num_targets is None else num_targets
        if isinstance(x, Tensor) and isinstance(weight, Tensor) and x.dim() and weight.dim():
            edge_index.edges_for(WHO, x.shape[0], num_targets, weight.shape[0])
        edge_index, edge_type = edge_index.edge_index, edge_index.edge_type
    _check(x, weight, edge_index, edge_type, edge_weight)
    n = x.shape[0]
    m = n if num_targets is None else check_size(WHO, "num_targets", num_targets)
    assert edge_type is not None
    edge_index, edge_type = seen_edges(edge_index, edge_type)
    return rgms_sum(
        x, weight, edge_index, edge_type, edge_weight, n, m, reduce == "mean", False
    )  # fmt: skip


def _check(x: Any, weight: Any, edge_index: Any, edge_type: Any, edge_weight: Any) -> None:
    """Raise unless operands fit each other; what graphs are is checked when they are first seen."""
    check_tensor(WHO, "x", x)
    check_tensor(WHO, "weight", weight, like=x)
    if x.dim() != 2:
        raise ValueError(f"{WHO}: argument 'x': expected shape (n, feat_in), got {tuple(x.shape)}")
    if weight.dim() not in (3, 4) or prod(weight.shape[1:-1]) != x.shape[1]:
        raise ValueError(
            f"{WHO}: argument 'weight': expected shape (relations, {x.shape[1]}, feat), or "
            f"(relations, blocks, rows, columns) with {x.shape[1]} rows in all, as 'x' has "
            f"{x.shape[1]} features, got {tuple(weight.shape)}"
        )
    for name, given in (("edge_index", edge_index), ("edge_type", edge_type)):
        if not isinstance(given, Tensor) or given.layout is not torch.strided:
            got = given.layout if isinstance(given, Tensor) else type(given).__name__
            raise TypeError(f"{WHO}: argument '{name}': expected a dense tensor, got {got}")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ValueError(
            f"{WHO}: argument 'edge_index': expected shape (2, E), got {tuple(edge_index.shape)}"
        )
    if edge_weight is not None:
        check_tensor(WHO, "edge_weight", edge_weight, like=x)
        if edge_weight.shape != edge_index.shape[1:]:
            raise ValueError(
                f"{WHO}: argument 'edge_weight': expected shape {tuple(edge_index.shape[1:])}, "
                f"got {tuple(edge_weight.shape)}"
            )
    others = {"weight": weight, "edge_index": edge_index, "edge_weight": edge_weight}
    for name, given in others.items():
        if given is not None and given.device != x.device:
            raise ValueError(
                f"{WHO}: argument '{name}': expected to be on {x.device} as 'x', got {given.device}"
            )


def _counts(weight: Tensor) -> tuple[int, int]:
    """Relations, and blocks of features, 0 without any."""
    return weight.shape[0], weight.shape[1] if weight.dim() == 4 else 0


def _values(
    relations: Relations, edge_weight: Tensor | None, mean: bool, dtype: torch.dtype,
    transposed: bool,
) -> Tensor | None:  # fmt: skip
    """(E,) of the elements, in the type that kernels compute in."""
    wide = torch.promote_types(dtype, torch.float32)
    if edge_weight is None:
        return relations.shares(wide, transposed) if mean else None
    values = relations.rows(transposed).arranged(edge_weight.to(wide))
    return values * relations.shares(wide, transposed) if mean else values


# -- sums at nodes --------------------------------------------------------------------------------


def _sum(
    x: Tensor, weight: Tensor, edge_index: Tensor, edge_type: Tensor, edge_weight: Tensor | None,
    n: int, m: int, mean: bool, transposed: bool,
) -> Tensor:  # fmt: skip
    relations = relations_of(edge_index, edge_type, n, m, weight.shape[0], WHO)
    values = _values(relations, edge_weight, mean, x.dtype, transposed)
    return rgms_kernels.of_nodes(relations, x, weight, values, transposed)


def _sum_backward(ctx: Any, grad: Tensor) -> Any:
    x, weight, *graph, edge_weight, n, m, mean, transposed = saved(ctx)
    for_x, for_weight, _, _, for_edges, *_ = ctx.needs_input_grad
    sizes = (n, m, mean)
    turned = weight.mT
    grad_x = grad_weight = grad_edges = None
    if for_x:
        grad_x = rgms_sum(grad, turned, *graph, edge_weight, *sizes, not transposed)
    # Features of sources, then of targets.
    ends = (grad, x) if transposed else (x, grad)
    if for_weight:
        grad_weight = rgms_weight(*ends, *graph, edge_weight, *_counts(weight), mean)
        grad_weight = grad_weight.mT if transposed else grad_weight
    if for_edges:
        grad_edges = rgms_edge(*ends, turned if transposed else weight, *graph, mean)
    return grad_x, grad_weight, None, None, grad_edges, None, None, None, None


rgms_sum = define(
    "rgms(Tensor x, Tensor weight, Tensor edge_index, Tensor edge_type, Tensor? edge_weight, "
    "SymInt n, SymInt m, bool mean, bool transposed) -> Tensor",
    _sum,
    lambda x, weight, edge_index, edge_type, edge_weight, n, m, mean, transposed: x.new_empty(
        (n if transposed else m, prod(weight.shape[1:-2]) * weight.shape[-1])
    ),
    _sum_backward,
    save_inputs,
)


# -- for the weights of relations -----------------------------------------------------------------


def _weight(
    x: Tensor, grad: Tensor, edge_index: Tensor, edge_type: Tensor, edge_weight: Tensor | None,
    count: int, blocks: int, mean: bool,
) -> Tensor:  # fmt: skip
    relations = relations_of(edge_index, edge_type, x.shape[0], grad.shape[0], count, WHO)
    values = _values(relations, edge_weight, mean, x.dtype, False)
    return rgms_kernels.of_weights(relations, x, grad, values, blocks)


def _weight_backward(ctx: Any, by: Tensor) -> Any:
    x, grad, *graph, edge_weight, _, _, mean = saved(ctx)
    for_x, for_grad, _, _, for_edges, *_ = ctx.needs_input_grad
    sizes = (x.shape[0], grad.shape[0], mean)
    turned = by.mT
    return (
        rgms_sum(grad, turned, *graph, edge_weight, *sizes, True) if for_x else None,
        rgms_sum(x, by, *graph, edge_weight, *sizes, False) if for_grad else None,
        None, None, rgms_edge(x, grad, by, *graph, mean) if for_edges else None, None, None, None,
    )  # fmt: skip


rgms_weight = define(
    "rgms_weight(Tensor x, Tensor grad, Tensor edge_index, Tensor edge_type, Tensor? edge_weight, "
    "SymInt count, SymInt blocks, bool mean) -> Tensor",
    _weight,
    lambda x, grad, edge_index, edge_type, edge_weight, count, blocks, mean: x.new_empty(
        (count, blocks, x.shape[1] // blocks, grad.shape[1] // blocks)
        if blocks
        else (count, x.shape[1], grad.shape[1])
    ),
    _weight_backward,
    save_inputs,
)


# -- for the weights of edges ---------------------------------------------------------------------


def _edge(
    x: Tensor, grad: Tensor, weight: Tensor, edge_index: Tensor, edge_type: Tensor, mean: bool
) -> Tensor:
    count = weight.shape[0]
    relations = relations_of(edge_index, edge_type, x.shape[0], grad.shape[0], count, WHO)
    found = rgms_kernels.of_edges(relations, x, weight, grad)
    if mean:
        found = found * relations.shares(found.dtype, False)
    found = relations.by_target.restored(found).to(x.dtype)
    return found


def _edge_backward(ctx: Any, by: Tensor) -> Any:
    x, grad, weight, *graph, mean = saved(ctx)
    for_x, for_grad, for_weight, *_ = ctx.needs_input_grad
    sizes = (x.shape[0], grad.shape[0], mean)
    turned = weight.mT
    return (
        rgms_sum(grad, turned, *graph, by, *sizes, True) if for_x else None,
        rgms_sum(x, weight, *graph, by, *sizes, False) if for_grad else None,
        rgms_weight(x, grad, *graph, by, *_counts(weight), mean) if for_weight else None,
        None, None, None,
    )  # fmt: skip


rgms_edge = define(
    "rgms_edge(Tensor x, Tensor grad, Tensor weight, Tensor edge_index, Tensor edge_type, "
    "bool mean) -> Tensor",
    _edge,
    lambda x, grad, weight, edge_index, edge_type, mean: x.new_empty(edge_index.shape[1:]),
    _edge_backward,
    save_inputs,
)
