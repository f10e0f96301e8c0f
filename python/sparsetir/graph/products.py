"""Products of features and weights: many rows, few columns, for which BLAS libraries are slow.

Tiles of rows by columns are accumulated in registers, as in all products of this package; the
gradient of weights sums over rows, in chunks. Weights fit the L2 cache; those that do not fit the
first are packed for each chunk of rows, since rows of a power of two share few of its lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from sparsetir.graph.expressions import aten, is_float32, same, shape_of
from sparsetir.graph.programs import layout
from sparsetir.ops.tensors import plain_tensor
from sparsetir.planning.run_plan import compiled
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.pipeline import Stages, lower
from sparsetir.schedules.targets import l1_bytes, pool, resolve_target, vector_registers
from sparsetir.schedules.templates.register_tile import greatest_divisor, straight_code, sums_of
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.script.parser import from_source

NAME = "product"
WORK = 1 << 20  # multiplications; fewer are left to torch
WEIGHTS = 1 << 17  # numbers of a matrix of weights that fits the L2 cache
LEAST, NARROW = 4, 8  # columns: any number between these, or whole vectors
WIDE, TALL = 4, 12  # most vectors in a row of a tile, and rows
ROWS = 32  # rows of a chunk: their values stay in the L1 cache for all tiles
PACKED = 128  # rows for which weights beyond that cache are copied, as wide as a tile
PERMUTED = {aten.permute.default, aten.t.default, aten.transpose.int}


@dataclass(frozen=True)
class Product:
    """A product that a kernel is compiled for, with any number of rows.

    inner, outer : sizes of the matrix of weights, or of its gradient
    gradient : whether it is `x.T @ y` of (rows, inner) and (rows, outer), rather than `x @ y` of
        (rows, inner) and (inner, outer)
    bias : "row" adds a vector (outer,); "into" adds to the result's contents; or "none"
    """

    inner: int
    outer: int
    gradient: bool = False
    bias: str = "none"

    def text(self) -> str:
        """The program of `out`, `x0`, `x1`, a bias `x2`, and the number of rows `m`."""
        rows, inner, outer = ("I", "i"), ("D0", "k0"), ("D1", "k1")
        operands = [[rows, inner], [rows if self.gradient else inner, outer]]
        over, result = [rows, inner, outer], [inner if self.gradient else rows, outer]
        if self.gradient:
            over = [inner, rows, outer]
        if self.bias == "row":
            operands.append([outer])
        at = ", ".join(name for _, name in result)
        first = "X2[k1]" if self.bias == "row" else "T.float32(0)"
        init = ["with T.init():", f"    OUT[{at}] = {first}"] if self.bias != "into" else []
        right = "i, k1" if self.gradient else "k0, k1"
        line = f"OUT[{at}] = OUT[{at}] + X0[i, k0] * X1[{right}]"
        return layout(NAME, operands, result, over, "SRS", [self.inner, self.outer], [*init, line])

    def schedule(self, target: Any) -> Callable[[Schedule], None]:
        """The schedule, which accumulates tiles of the result in registers."""
        bits, registers = vector_registers(target)
        lanes = 1 << (min(bits // 32, self.outer).bit_length() - 1)
        while self.outer > NARROW and self.outer % lanes and lanes > NARROW:
            lanes //= 2
        vectors = greatest_divisor(self.outer // lanes, WIDE)
        rows = min(TALL, (registers - 1) // vectors - 1)  # beside vectors of weights, an element
        packed = not self.gradient and 8 * self.inner * self.outer > l1_bytes()  # half of it

        def apply(sch: Schedule) -> None:
            iteration = sch.get_sparse_iteration(NAME)
            loops = sch.get_sp_iters(iteration)
            lines, summed = loops[:2]
            tile, *held = sch.split(loops[2], [None, vectors, lanes], tail="shift")
            start = []
            if not self.gradient:
                summed, shape = loops[1], [None, PACKED // rows, rows] if packed else [None, rows]
                *start, first, line = sch.split(lines, shape, tail="repeat")
                around = [*start, first, tile]
            else:
                first, line = sch.split(lines, [None, min(rows, self.inner)], tail="shift")
                count = -(-self.inner // rows)
                if min(pool(), count) > 1:
                    *start, first = sch.split(first, [None, -(-count // pool())])
                part, summed = sch.split(summed, [None, ROWS])
                around = [*start, part, first, tile]
            steps = sums_of(sch, iteration, "OUT", around, [summed], [line, *held])
            if packed:
                inside, _, *held = sch.get_sp_iters(sch.get_sparse_iteration(f"{NAME}_reduce"))
                copies = sch.precompute("X1", start[0], [tile, inside, *held], scope="global")
                steps += [(copy, len(held)) for copy in copies]
            if start or not self.gradient:
                sch.parallelize(around[0])
            straight_code(sch, steps)

        return apply

    def stages(self, target: Any) -> Stages:
        """The stages of the scheduled program."""
        return lower(from_source(self.text()), self.schedule(target), target=target)

    def kernel(self) -> Kernel:
        """The kernel, compiled on first use."""
        target = resolve_target("llvm")
        return compiled((NAME, self), target, lambda: self.stages(target))


def profitable(rows: Any, inner: Any, outer: Any) -> bool:
    """Whether our kernels are as fast as torch's: weights fit a cache and fill vectors."""
    if not isinstance(inner, int) or not isinstance(outer, int):
        return False
    fills = LEAST <= outer <= NARROW or outer % NARROW == 0
    many = not isinstance(rows, int) or rows * inner * outer >= WORK
    return fills and many and 1 < inner and inner * outer <= WEIGHTS


class Run:
    """A product in one of torch's graphs."""

    def __init__(self, gradient: bool) -> None:
        self.gradient = gradient
        self.__name__ = NAME  # torch's graphs need it
        self._kernels: dict[Product, Kernel] = {}

    def __call__(
        self, x: Tensor, y: Tensor, bias: Tensor | None = None, into: bool = False
    ) -> Tensor:
        """Compute the product in new memory or, with `into`, added to the bias.

        x, y : operands of :class:`Product`; bias : (outer,) or of the result's shape
        """
        (rows, inner), outer = x.shape, y.shape[1]
        if not profitable(rows, inner, outer):
            left = x.t() if self.gradient else x
            if bias is None:
                return torch.mm(left, y)
            return bias.addmm_(left, y) if into else torch.addmm(bias, left, y)
        arrays = [x, y]
        if bias is None or bias.dim() == 1:
            out = torch.empty((inner if self.gradient else rows, outer), dtype=torch.float32)
            arrays += [] if bias is None else [bias]
        else:
            out = bias if into and bias.is_contiguous() else bias.contiguous().clone()
        kind = "none" if bias is None else "row" if bias.dim() == 1 else "into"
        product = Product(inner, outer, self.gradient, kind)
        kernel = self._kernels.get(product)
        if kernel is None:
            kernel = self._kernels[product] = product.kernel()
        kernel.run_unchecked([out, *map(_plain, arrays), rows])
        return out


def _plain(x: Tensor) -> Tensor:
    x = x.detach() if x.requires_grad else x
    return plain_tensor(x) if x.is_neg() or x._is_zerotensor() else x.contiguous()


def take_products(graph: fx.Graph) -> None:
    """Replace products of features and weights by our kernels, if they are faster."""
    for node in list(graph.nodes):
        if node.target not in (aten.mm.default, aten.addmm.default, aten.addmm_.default):
            continue
        *bias, x, y = node.args
        if node.kwargs or not is_float32(node) or not all(map(is_float32, node.args)):
            continue
        gradient = untransposed(x)
        rows, inner = shape_of(x if gradient is None else gradient)
        outer = shape_of(y)[1]
        if not profitable(rows, inner, outer):
            continue
        if bias:
            sizes, whole = shape_of(bias[0]), shape_of(node)
            if not sizes or not all(map(same, sizes, whole[-len(sizes) :])):
                continue
        into = node.target == aten.addmm_.default
        node.target = Run(gradient is not None)
        node.args = (x if gradient is None else gradient, y, *bias)
        node.kwargs = {"into": True} if into else {}
    graph.eliminate_dead_code()


def untransposed(x: fx.Node) -> fx.Node | None:
    """The matrix that x is the transpose of, or None."""
    if x.target not in PERMUTED or len(shape_of(x)) != 2:
        return None
    args: Any = x.args
    if x.target == aten.permute.default and list(args[1]) != [1, 0]:
        return None
    return args[0]
