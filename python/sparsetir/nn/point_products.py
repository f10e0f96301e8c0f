"""Sums over the offsets of a kernel: y[i] = sum of x[j] W[r] over pairs (i, j) of offsets r.

Offsets are relations of relational gather-matmul-scatter, whose kernels compute them. The operators
take where points are, and find the pairs by that: so they have gradients of all orders, which are
the sum in both directions and one for the weights, and torch.compile sees nothing else.
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from sparsetir.nn.kernel_map import Convolution
from sparsetir.nn.points import KernelMap, Places, places_of, transposed
from sparsetir.ops.registry import define, save_inputs, saved
from sparsetir.ops.relations import RelationRows, Relations
from sparsetir.ops.rgms_kernels import of_nodes, of_weights


def products(
    x: Tensor, weight: Tensor, conv: Convolution, fine: Places, coarse: Places | None = None,
    back: bool = False,
) -> Tensor:  # fmt: skip
    """(outputs, feat), of x (inputs, feat_in) and weight (offsets, feat_in, feat), with gradients.

    fine, coarse : inputs and outputs; by default both are the same points
    back : the transposed convolution, from `coarse` to `fine`
    """
    onto = None if coarse is None else coarse.coords
    return points_sum(x, weight, fine.coords, onto, list(conv.numbers), back)


# -- sums at points -------------------------------------------------------------------------------


def _sum(
    x: Tensor, weight: Tensor, fine: Tensor, coarse: Tensor | None, conv: list[int], back: bool
) -> Tensor:
    return of_nodes(_relations(fine, coarse, conv), x, weight, None, back)


def _sum_fake(
    x: Tensor, weight: Tensor, fine: Tensor, coarse: Tensor | None, conv: list[int], back: bool
) -> Tensor:
    outputs = fine if coarse is None or back else coarse
    return x.new_empty((outputs.shape[0], weight.shape[2]))


def _sum_backward(ctx: Any, grad: Tensor) -> Any:
    x, weight, fine, coarse, conv, back = saved(ctx)
    for_x, for_weight, *_ = ctx.needs_input_grad
    grad_x = grad_weight = None
    if for_x:
        grad_x = points_sum(grad, weight.transpose(1, 2), fine, coarse, conv, not back)
    if for_weight:
        grad_weight = points_weight(*((grad, x) if back else (x, grad)), fine, coarse, conv)
        grad_weight = grad_weight.transpose(1, 2) if back else grad_weight
    return grad_x, grad_weight, None, None, None, None


points_sum = define(
    "points_sum(Tensor x, Tensor weight, Tensor fine, Tensor? coarse, int[] conv, bool back) "
    "-> Tensor",
    _sum,
    _sum_fake,
    _sum_backward,
    save_inputs,
)


# -- for the weights ------------------------------------------------------------------------------


def _weight(
    x: Tensor, grad: Tensor, fine: Tensor, coarse: Tensor | None, conv: list[int]
) -> Tensor:
    return of_weights(_relations(fine, coarse, conv), x, grad, None)


def _weight_backward(ctx: Any, by: Tensor) -> Any:
    x, grad, *where = saved(ctx)
    for_x, for_grad, *_ = ctx.needs_input_grad
    return (
        points_sum(grad, by.transpose(1, 2), *where, True) if for_x else None,
        points_sum(x, by, *where, False) if for_grad else None,
        None, None, None,
    )  # fmt: skip


points_weight = define(
    "points_weight(Tensor x, Tensor grad, Tensor fine, Tensor? coarse, int[] conv) -> Tensor",
    _weight,
    lambda x, grad, fine, coarse, conv: x.new_empty((prod(conv[:3]), x.shape[1], grad.shape[1])),
    _weight_backward,
    save_inputs,
)


# -- what kernels want of a map -------------------------------------------------------------------


def _relations(fine: Tensor, coarse: Tensor | None, numbers: list[int]) -> Relations:
    inputs, conv = places_of(fine), Convolution.of_numbers(numbers)
    if coarse is None:
        pairs = inputs.submanifold(conv)
    else:
        pairs = inputs.onto(places_of(coarse), conv)
    return pairs.remembered("relations", lambda found: _of_map(found, inputs))


def _of_map(pairs: KernelMap, inputs: Places) -> Relations:
    """The pairs of a map as edges, each row with one; `inputs` : the places of its inputs."""

    def rows(found: KernelMap) -> RelationRows:
        return RelationRows.of(found.row_ptr, found.rows, found.indptr, found.indices)

    return Relations(rows(pairs), lambda: rows(transposed(pairs, inputs)), pairs.n, pairs.m)
