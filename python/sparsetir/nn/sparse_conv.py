"""Convolutions of points on a grid, in the manner of MinkowskiEngine, TorchSparse and spconv.

>>> import torch
>>> from sparsetir.nn import SparseConv3d, SparseConvTranspose3d, SparsePoints
>>> x = SparsePoints(torch.tensor([[0, 5, 4, 4], [0, 5, 4, 5], [0, 9, 9, 9]]), torch.randn(3, 4))
>>> down, up = SparseConv3d(4, 8, 2, stride=2), SparseConvTranspose3d(8, 4, 2, stride=2)
>>> down(x)
SparsePoints(2 points, 8 channels, batch_size=1, stride=(2, 2, 2))
>>> down(x).coords.tolist()
[[0, 2, 2, 2], [0, 4, 4, 4]]
>>> up(down(x))
SparsePoints(3 points, 4 channels, batch_size=1, stride=(1, 1, 1))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Parameter

from sparsetir.nn.kernel_map import Convolution
from sparsetir.nn.points import (
    KernelMap,
    Places,
    SparsePoints,
    convolution,
    places_of,
    reached_by,
    transposed,
)
from sparsetir.ops.registry import Gradients, Operation, Operator
from sparsetir.ops.relations import RelationRows, Relations
from sparsetir.ops.rgms_kernels import node_sums, weight_gradients
from sparsetir.ops.tensors import check_size
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.refusals import wrong

_untraced = _disable_dynamo(reached_by)  # imports its dependencies when called


class _Convolution(torch.nn.Module):
    """The base of both convolutions: parameters, checks and the sum.

    weight : (kernel x, kernel y, kernel z, in_channels, out_channels)
    bias : (out_channels,), or None
    """

    in_channels: int
    out_channels: int
    conv: Convolution
    submanifold: bool
    weight: Parameter
    bias: Parameter | None

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: object, stride: object,
        padding: object, dilation: object, submanifold: bool, bias: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        caller = type(self).__name__
        for name, value in (("in_channels", in_channels), ("out_channels", out_channels)):
            check_size(caller, name, value, 1)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.conv, self.submanifold = convolution(
            caller, kernel_size, stride, padding, dilation, submanifold
        )
        kernel = self.conv.kernel_size
        self.weight = Parameter(torch.empty(*kernel, in_channels, out_channels))
        self.bias = Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew, from the same intervals as torch's dense convolutions."""
        bound = 1 / math.sqrt(self.in_channels * self.conv.offsets)
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def _check(self, x: object) -> None:
        caller = type(self).__name__
        if not isinstance(x, SparsePoints):
            raise wrong(caller, "x", "SparsePoints", type(x).__name__, TypeError)
        features = x.features
        if features.shape[1] != self.in_channels:
            raise wrong(caller, "x", f"{self.in_channels} channels", features.shape[1])
        if features.dtype != self.weight.dtype:
            expected = f"features of {dtype_name(self.weight)} as the weights"
            raise wrong(caller, "x", expected, dtype_name(features), TypeError)

    def _sum(self, x: SparsePoints, places: Places, *between: Any) -> SparsePoints:
        """Make points at `places`; between : the inputs and outputs of :func:`products`."""
        out = products(x.features, self.weight.flatten(0, 2), self.conv, *between)
        out = out if self.bias is None else out + self.bias
        return SparsePoints.at(places, out, x.batch_size)

    def extra_repr(self) -> str:
        """The layer's arguments, for its representation."""
        conv = self.conv
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={conv.kernel_size}"
        if self.submanifold:
            text += ", submanifold=True"
        else:
            text += f", stride={conv.stride}, padding={conv.padding}"
        if conv.dilation != (1, 1, 1):
            text += f", dilation={conv.dilation}"
        return text if self.bias is not None else f"{text}, bias=False"


class SparseConv3d(_Convolution):
    """y[o] = b + sum over k of x[o * stride - padding + k * dilation] W[k], where there is an x.

    With stride 1 outputs are at the points of the input (submanifold): there the result is that of
    a dense convolution with `padding="same"`, so that kernels of even size reach one further to the
    right. With another stride, or `submanifold=False`, outputs are at all o that some input
    reaches, numbered as in a dense convolution, in lexicographic order: the result is that of
    `torch.nn.functional.conv3d` on a grid without bounds, as in spconv. MinkowskiEngine keeps the
    coordinates of the finest grid, multiples of the stride, and has an output for each nonempty
    cell of the coarse grid, which is the same here for `kernel_size == stride` without padding.

    Parameters
    ----------
    in_channels, out_channels : int
        Features of the inputs and of the outputs.
    kernel_size, stride, padding, dilation : int or (int, int, int)
        One number, or three for x, y and z; padding is 0 by default.
    submanifold : bool
        Whether a stride of 1 keeps the input's points.
    bias : bool
        Add b.

    Attributes
    ----------
    weight : (kernel x, kernel y, kernel z, in_channels, out_channels) Parameter
        The weight; that of torch's dense layer is `weight.permute(4, 3, 0, 1, 2)`.
    bias : (out_channels,) Parameter or None
        b.

    Notes
    -----
    Sums are in float32 for float16 and bfloat16. Gradients of all orders exist. In compiled code
    (torch.compile) a submanifold convolution is one operator; the outputs of others depend on the
    points' coordinates, which breaks the graph.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int, int],
        stride: int | tuple[int, int, int] = 1,
        padding: int | tuple[int, int, int] | None = None,
        dilation: int | tuple[int, int, int] = 1,
        submanifold: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, submanifold, bias
        )

    def forward(self, x: SparsePoints) -> SparsePoints:
        """Run the layer.

        Parameters
        ----------
        x : SparsePoints
            Points with `in_channels` features.

        Returns
        -------
        SparsePoints
            Points with `out_channels` features.
        """
        self._check(x)
        if self.submanifold:
            return self._sum(x, x.places, x.places)
        # The outputs depend on coordinates, so their computation is not traced.
        reach = _untraced if torch.compiler.is_compiling() else reached_by
        places = reach(type(self).__name__, x.places, self.conv)[1]
        return self._sum(x, places, x.places, places)


class SparseConvTranspose3d(_Convolution):
    """The transposed convolution, back onto the points that a strided one came from.

    y[i] = b + sum over k and o with o * stride - padding + k * dilation = i of x[o] W[k], as in
    `torch.nn.functional.conv_transpose3d`. Points and features are as in :class:`SparseConv3d`.

    Parameters
    ----------
    in_channels, out_channels, kernel_size, stride, padding, dilation, bias
        The same as for :class:`SparseConv3d`, except submanifolds.

    Attributes
    ----------
    weight : (kernel x, kernel y, kernel z, in_channels, out_channels) Parameter
        The weight; that of torch's dense layer is `weight.permute(3, 4, 0, 1, 2)`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int, int],
        stride: int | tuple[int, int, int] = 1,
        padding: int | tuple[int, int, int] = 0,
        dilation: int | tuple[int, int, int] = 1,
        bias: bool = True,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, False, bias
        )

    def forward(self, x: SparsePoints, onto: SparsePoints | None = None) -> SparsePoints:
        """Run the layer.

        Parameters
        ----------
        x : SparsePoints
            Points with `in_channels` features.
        onto : SparsePoints, optional
            Points at which to compute the result; by default those that x came from by a strided
            convolution.

        Returns
        -------
        SparsePoints
            Points with `out_channels` features.

        Raises
        ------
        ValueError
            If x came from no strided convolution, and `onto` is missing.
        """
        caller = type(self).__name__
        self._check(x)
        if onto is not None and not isinstance(onto, SparsePoints):
            raise wrong(caller, "onto", "SparsePoints", type(onto).__name__, TypeError)
        if onto is not None:
            places = onto.places
        elif x.places.before is not None:
            places = x.places.before[0]
        else:
            raise ValueError(
                f"{caller}: argument 'onto': expected points, as x came from no strided convolution"
            )
        return self._sum(x, places, places, x.places, True)


def products(
    x: Tensor,
    weight: Tensor,
    conv: Convolution,
    fine: Places,
    coarse: Places | None = None,
    back: bool = False,
) -> Tensor:
    """Convolve x (inputs, feat_in) with weight (offsets, feat_in, feat), with gradients.

    fine, coarse : inputs and outputs; by default both are the same points
    back : whether it is the transposed convolution, from `coarse` to `fine`
    """
    onto = None if coarse is None else coarse.coords
    return points_sum(x, weight, fine.coords, onto, list(conv.numbers), back)


@dataclass
class PointsSum(Operation[Tensor]):
    """The operator of convolutions."""

    x: Tensor
    weight: Tensor
    fine: Tensor
    coarse: Tensor | None
    conv: list[int]
    back: bool

    def run(self) -> Tensor:
        relations = _relations(self.fine, self.coarse, self.conv)
        return node_sums(relations, self.x, self.weight, None, self.back)

    def fake(self) -> Tensor:
        outputs = self.fine if self.coarse is None or self.back else self.coarse
        return self.x.new_empty((outputs.shape[0], self.weight.shape[2]))

    def gradients(self, grad: Tensor) -> Gradients:
        where, back = (self.fine, self.coarse, self.conv), self.back
        ends = (grad, self.x) if back else (self.x, grad)

        def for_weight() -> Tensor:
            gradient = points_weight(*ends, *where)
            return gradient.mT if back else gradient

        return {
            "x": lambda: points_sum(grad, self.weight.mT, *where, not back),
            "weight": for_weight,
        }


points_sum = Operator("points_sum", PointsSum)


@dataclass
class PointsWeight(Operation[Tensor]):
    """The gradient of convolutions for the weights."""

    x: Tensor
    grad: Tensor
    fine: Tensor
    coarse: Tensor | None
    conv: list[int]

    def run(self) -> Tensor:
        return weight_gradients(
            _relations(self.fine, self.coarse, self.conv), self.x, self.grad, None
        )

    def fake(self) -> Tensor:
        return self.x.new_empty((prod(self.conv[:3]), self.x.shape[1], self.grad.shape[1]))

    def gradients(self, grad: Tensor) -> Gradients:
        where = self.fine, self.coarse, self.conv
        return {
            "x": lambda: points_sum(self.grad, grad.mT, *where, True),
            "grad": lambda: points_sum(self.x, grad, *where, False),
        }


points_weight = Operator("points_weight", PointsWeight)


# -- kernel maps as relations ---------------------------------------------------------------------


def _relations(fine: Tensor, coarse: Tensor | None, numbers: list[int]) -> Relations:
    inputs, conv = places_of(fine), Convolution.from_numbers(numbers)
    if coarse is None:
        pairs = inputs.submanifold(conv)
    else:
        pairs = inputs.onto(places_of(coarse), conv)
    return pairs.remembered("relations", lambda pairs: _map_relations(pairs, inputs))


def _map_relations(pairs: KernelMap, inputs: Places) -> Relations:
    """The pairs of a map as edges, one in each row; inputs : the places of its inputs."""

    def rows(x: KernelMap) -> RelationRows:
        return RelationRows.of(x.row_ptr, x.rows, x.indptr, x.indices)

    return Relations(rows(pairs), lambda: rows(transposed(pairs, inputs)), pairs.n, pairs.m)
