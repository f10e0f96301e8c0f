"""Sums over the offsets of a kernel: y[i] = sum of x[j] W[r] over pairs (i, j) of offsets r.

Offsets are relations of relational gather-matmul-scatter, whose kernels compute them. The operators
take where points are, and find the pairs by that: so they have gradients of all orders, which are
the sum in both directions and one for the weights, and torch.compile sees nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

from sparsetir.nn.kernel_map import Convolution
from sparsetir.nn.points import KernelMap, Places, places_of, transposed
from sparsetir.ops.registry import Gradients, Operation, Operator
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


@dataclass
class PointsSum(Operation[Tensor]):
    """Sums at points."""

    x: Tensor
    weight: Tensor
    fine: Tensor
    coarse: Tensor | None
    conv: list[int]
    back: bool

    def run(self) -> Tensor:
        relations = _relations(self.fine, self.coarse, self.conv)
        return of_nodes(relations, self.x, self.weight, None, self.back)

    def fake(self) -> Tensor:
        outputs = self.fine if self.coarse is None or self.back else self.coarse
        return self.x.new_empty((outputs.shape[0], self.weight.shape[2]))

    def gradients(self, grad: Tensor) -> Gradients:
        where, back = (self.fine, self.coarse, self.conv), self.back
        ends = (grad, self.x) if back else (self.x, grad)

        def for_weight() -> Tensor:
            found = points_weight(*ends, *where)
            return found.mT if back else found

        return {
            "x": lambda: points_sum(grad, self.weight.mT, *where, not back),
            "weight": for_weight,
        }


points_sum = Operator("points_sum", PointsSum)


@dataclass
class PointsWeight(Operation[Tensor]):
    """For the weights."""

    x: Tensor
    grad: Tensor
    fine: Tensor
    coarse: Tensor | None
    conv: list[int]

    def run(self) -> Tensor:
        return of_weights(_relations(self.fine, self.coarse, self.conv), self.x, self.grad, None)

    def fake(self) -> Tensor:
        return self.x.new_empty((prod(self.conv[:3]), self.x.shape[1], self.grad.shape[1]))

    def gradients(self, grad: Tensor) -> Gradients:
        where = self.fine, self.coarse, self.conv
        return {
            "x": lambda: points_sum(self.grad, grad.mT, *where, True),
            "grad": lambda: points_sum(self.x, grad, *where, False),
        }


points_weight = Operator("points_weight", PointsWeight)


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
