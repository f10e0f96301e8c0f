"""Translation of torch's operators to expressions of stage I.

An expression is text with {n} for the access to operand n; it is built from a node of a torch graph
by following pointwise operators, views and gathers backwards.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from string import Formatter
from typing import Any, NamedTuple

import torch
from torch import fx

from sparsetir.graph.programs import GIVEN, Operand, filled
from sparsetir.ops.tensors import DTYPES
from sparsetir.schedules.operators.names import BINARY

aten, prims = torch.ops.aten, torch.ops.prims
Size = int | torch.SymInt
SMALL = 32  # most numbers per edge whose product with a matrix is recomputed where it is read
LONGEST = 600  # characters of an expression; longer ones are stored


def number(value: float) -> str:
    """The text of a constant, whose type is open (see :class:`Program`)."""
    value = float(value)
    finite = value - value == 0
    return f"{{numbers}}({value!r})" if finite else f'{{numbers}}("{value}")'


def _extreme(sign: str) -> str:
    """The formula of a maximum (">") or minimum ("<"); NaN if one argument is."""
    other = 'T.Select({0} <= {numbers}("inf"), {1}, {0})'
    return f"T.Select({{0}} {sign}= {{1}}, {{0}}, {other})"


def _exp_less_one(tanh: str) -> str:
    """The formula of exp(x) - 1, near 0 by tanh(x / 2) to avoid cancellation."""
    near = f"({number(2)} * {tanh} / ({number(1)} - {tanh}))"
    return f"T.Select(T.abs({{0}}) < {number(1)}, {near}, T.exp({{0}}) - {number(1)})"


# Formulas by operator: {0}, {1} and so on are its arguments, tensors or numbers.
COMPARISONS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}
ONE, ZERO = number(1), number(0)
FORMULAS: dict[Any, str] = {
    aten.abs.default: "T.abs({0})",
    aten.clamp_max.default: "T.Select({0} > {1}, {1}, {0})",
    aten.clamp_min.default: "T.Select({0} < {1}, {1}, {0})",
    aten.exp.default: "T.exp({0})",
    aten.expm1.default: _exp_less_one(f"T.tanh({number(0.5)} * {{0}})"),
    aten.leaky_relu.default: f"T.Select({{0}} > {ZERO}, {{0}}, {{0}} * {{1}})",
    aten.leaky_relu_backward.default: f"T.Select({{1}} > {ZERO}, {{0}}, {{0}} * {{2}})",
    aten.log.default: "T.log({0})",
    aten.log1p.default: "T.log1p({0})",
    aten.masked_fill.Scalar: "T.Select({1}, {2}, {0})",
    aten.maximum.default: _extreme(">"),
    aten.minimum.default: _extreme("<"),
    aten.neg.default: f"({ZERO} - {{0}})",
    aten.reciprocal.default: f"({ONE} / {{0}})",
    aten.relu.default: f"T.Select({{0}} <= {ZERO}, {ZERO}, {{0}})",
    aten.rsqrt.default: f"({ONE} / T.sqrt({{0}}))",
    aten.sigmoid.default: f"({ONE} / ({ONE} + T.exp({ZERO} - {{0}})))",
    aten.sigmoid_backward.default: f"({{0}} * ({{1}} * ({ONE} - {{1}})))",
    aten.silu.default: f"({{0}} / ({ONE} + T.exp({ZERO} - {{0}})))",
    aten.sqrt.default: "T.sqrt({0})",
    aten.tanh.default: "T.tanh({0})",
    aten.tanh_backward.default: f"({{0}} * ({ONE} - {{1}} * {{1}}))",
    aten.threshold_backward.default: f"T.Select({{1}} <= {{2}}, {ZERO}, {{0}})",
    aten.where.self: "T.Select({0}, {1}, {2})",
}
LOGICAL: dict[Any, str] = {
    aten.bitwise_and.Tensor: "T.And({0}, {1})", aten.bitwise_not.default: "T.Not({0})",
    aten.bitwise_or.Tensor: "T.Or({0}, {1})", aten.logical_and.default: "T.And({0}, {1})",
    aten.logical_not.default: "T.Not({0})", aten.logical_or.default: "T.Or({0}, {1})",
}  # fmt: skip
for _name, _sign in BINARY.items():
    for _kind in ("Tensor", "Scalar"):
        FORMULAS[getattr(getattr(aten, _name), _kind)] = f"({{0}} {_sign} {{1}})"
COMPARED = {
    getattr(getattr(aten, name), kind): sign
    for name, sign in COMPARISONS.items()
    for kind in ("Tensor", "Scalar")
}
POWERS = {2: "({0} * {0})", 1: "{0}", 0.5: "T.sqrt({0})", -1: f"({ONE} / {{0}})",
          -0.5: f"({ONE} / T.sqrt({{0}}))", 3: "({0} * {0} * {0})", 0: ONE}  # fmt: skip
CASTS = {aten._to_copy.default, prims.convert_element_type.default}
SAME = {aten.alias.default, aten.clone.default, aten.detach.default, aten.lift_fresh_copy.default}
VIEWS = {
    aten._unsafe_view.default, aten.expand.default, aten.reshape.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.unsqueeze.default, aten.view.default,
}  # fmt: skip
FILLED = {
    aten.full.default: None, aten.full_like.default: None, aten.ones.default: 1,
    aten.new_ones.default: 1, aten.ones_like.default: 1, aten.zeros.default: 0,
    aten.new_zeros.default: 0, aten.zeros_like.default: 0,
}  # fmt: skip
POINTWISE = {*FORMULAS, *LOGICAL, *COMPARED, aten.pow.Tensor_Scalar}
COSTLY = {
    aten.exp.default, aten.expm1.default, aten.log.default, aten.log1p.default,
    aten.sigmoid.default, aten.silu.default, aten.tanh.default,
}  # fmt: skip


def first(node: fx.Node) -> fx.Node:
    """The first argument, which is a node."""
    argument = node.args[0]
    assert isinstance(argument, fx.Node)
    return argument


def shape_of(node: object) -> tuple[Size, ...]:
    """The shape of a node's value; () if it is not a tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def dtype_of(node: object) -> torch.dtype | None:
    """The dtype of a node's value; None if it is not a tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def dims_of(node: fx.Node) -> list[int]:
    """The dimensions of its argument that an operator reduces."""
    dims: Any = node.args[1] if len(node.args) > 1 else None
    rank = len(shape_of(first(node)))
    return sorted(d % rank for d in (dims or range(rank)))


def axes_of(values: fx.Node) -> list[int | None]:
    """The loop of each dimension after the first, None for those of size 1."""
    axes: list[int | None] = []
    for size in shape_of(values)[1:]:
        axes.append(None if is_one(size) else sum(a is not None for a in axes))
    return axes


def kept_axes(axes: list[int | None], dims: int, rank: int) -> tuple[list[int | None], int]:
    """The axes of a result without the last `dims` dimensions, and the number of their loops."""
    kept, lost = axes[: len(axes) - dims], axes[len(axes) - dims :]
    return kept + [None] * (rank - 1 - len(kept)), sum(a is not None for a in lost)


def unviewed(node: fx.Node) -> fx.Node:
    """The node that a node is a view of, through all views."""
    while node.op == "call_function" and node.target in SAME | VIEWS:
        node = first(node)
    return node


def is_float(node: object, dtypes: Collection[torch.dtype] = DTYPES.keys()) -> bool:
    """Whether a node is a tensor of a float type on a CPU."""
    return (
        isinstance(node, fx.Node)
        and dtype_of(node) in dtypes
        and node.meta["val"].device.type == "cpu"
    )


def is_float32(node: object) -> bool:
    """Whether a node is a float32 tensor on a CPU."""
    return is_float(node, (torch.float32,))


def is_cast(node: fx.Node) -> bool:
    """Whether a node is a tensor of a float type that is cast to another one."""
    return (
        node.op == "call_function"
        and node.target in CASTS
        and is_float(node)
        and is_float(node.args[0])
    )


def wide(dtype: Any) -> torch.dtype:
    """The type that numbers of a type are computed and summed up in."""
    return torch.promote_types(dtype, torch.float32)


def is_one(size: object) -> bool:
    """Whether a size is known to be 1."""
    return isinstance(size, int) and size == 1


def same(a: object, b: object) -> bool:
    """Whether sizes are known to be equal, by value or by name."""
    return a == b if isinstance(a, int) and isinstance(b, int) else str(a) == str(b)


def same_shape(a: object, b: object) -> bool:
    """Whether values are known to have the same shape."""
    sizes, others = shape_of(a), shape_of(b)
    return len(sizes) == len(others) and all(map(same, sizes, others))


def index_of(node: object) -> fx.Node | None:
    """The vector of nodes, one per edge, that an index consists of, or None."""
    while isinstance(node, fx.Node) and node.op == "call_function" and node.target in SAME | VIEWS:
        before = first(node)
        sizes = shape_of(before)
        if (
            not sizes
            or any(not is_one(s) for s in sizes[1:])
            or not same(sizes[0], shape_of(node)[0])
        ):
            break
        node = before
    is_vector = len(shape_of(node)) == 1 and dtype_of(node) in (torch.int32, torch.int64)
    return node if is_vector and isinstance(node, fx.Node) else None


def passed(node: fx.Node, count: int) -> list[Any] | None:
    """The first `count` arguments of a torch operator, with their defaults; None if another one is
    not its default, which would change the result."""
    target: Any = node.target
    schema = target._schema.arguments
    named = dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
    values = [named.get(a.name, a.default_value) for a in schema]
    others = zip(schema[count:], values[count:], strict=True)
    if any(a.name != "self_is_result" and x != a.default_value for a, x in others):
        return None
    return values[:count]


def formula_of(node: fx.Node) -> tuple[str, list[Any]] | None:
    """The formula of a pointwise operator on numbers, and the arguments that it reads; None for an
    unsupported operator or argument."""
    target: Any = node.target
    sign = COMPARED.get(target)
    formula = f"({{0}} {sign} {{1}})" if sign else FORMULAS.get(target)
    numbers: list[Any] = []
    if target == aten.pow.Tensor_Scalar:
        formula, numbers = POWERS.get(node.args[1]), [node.args[1]]
    elif target == aten.clamp.default:
        formula, numbers = "{0}", [*node.args[1:], None][:2]
        for bound, name in zip(numbers, ("clamp_min", "clamp_max"), strict=True):
            if bound is not None:
                formula = filled(FORMULAS[getattr(aten, name).default], formula, number(bound))
    if formula is None:
        return None
    fields = {int(n) for _, n, *_ in Formatter().parse(formula) if n and n.isdigit()}
    args = passed(node, 1 + max([len(numbers), *fields]))
    if args is None or any(x != x for x in args if isinstance(x, float)):  # NaN
        return None
    return formula, args[: len(args) - len(numbers)]


def module_of(node: fx.Node) -> tuple[str, str]:
    """The name and class of the innermost module that a node stems from; "" for none.

    A node of a backward pass stems from the module that its gradient is of.
    """
    meta = node.meta
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    name, kind = list(stack.values())[-1] if stack else ("", "")
    kind = kind if isinstance(kind, str) else kind.__name__
    # Dynamo's names are expressions, such as L['self'].convs[0].
    path = re.sub(r"[LG]?\['?(\w+)'?\]", r".\1", str(name)).strip(".")
    model, _, rest = path.partition(".")
    return rest if model in ("self", "fn") else path, kind.rpartition(".")[2]


def gather_of(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The tensor that a node gathers rows of, and the vector of their indices; None for others."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    args: Any = node.args
    source, index = args[0], None
    rank = len(shape_of(source))
    if node.target == aten.index_select.default and args[1] % max(1, rank) == 0:
        index = args[2]
    elif node.target == aten.index.Tensor and len(args[1]) == 1:
        index = args[1][0]
        if len(shape_of(index)) != 1:
            return None
    elif node.target == aten.gather.default and args[1] % max(1, rank) == 0:
        sizes = zip(shape_of(source)[1:], shape_of(args[2])[1:], strict=True)
        index = args[2] if all(same(a, b) for a, b in sizes) else None
    vector = index_of(index) if index is not None else None
    return None if vector is None else (source, vector)


class Finished(NamedTuple):
    """An expression, and the tensors and indices that it reads.

    indices : the index of rows, other indices, and those that sort values of edges
    others : number of other indices
    dtype : type of the computation
    """

    text: str
    operands: tuple[Operand, ...]
    tensors: list[fx.Node]
    indices: list[fx.Node]
    others: int
    dtype: str


def edge_product(x: Any, weights: Any, *bias: Any) -> Any:
    """The product of vectors of edges and a small matrix, whose columns may have several
    dimensions, plus a bias; a placeholder in graphs while regions are searched for."""
    product = torch.tensordot(x, weights, 1)
    return product + bias[0] if bias else product


class Stored(Exception):
    """Raised for a value that cannot be recomputed per edge, nor be read as a tensor of floats."""


class Expression:
    """A builder of the expression of a value of edges, which collects what it reads.

    rows : the index that sorts the edges; None while undecided
    stored : values of edges that are read rather than recomputed, with the index that sorts each
    count : number of nodes of the index of rows; None to take it from the first tensor read
    dtype : type of the computation, float64 if any part of it is
    """

    def __init__(
        self,
        rows: fx.Node | None,
        stored: dict[fx.Node, fx.Node | None],
        count: Size | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.rows, self.stored, self.count = rows, stored, count
        self.tensors: list[fx.Node] = []
        self.operands: list[Operand] = []
        self.others: list[fx.Node] = []
        self.counts: list[Size] = []  # numbers of nodes of the other indices
        self.orders: list[fx.Node | None] = []  # the index that sorts each operand, if stored
        self.dtype = dtype

    def of(self, node: fx.Node, axes: Sequence[int | None], root: bool = False) -> str:
        """The expression of a node whose dimensions after the first have these loops."""
        if dtype_of(node) == torch.float64:
            self.dtype = torch.float64
        if node in self.stored and not root:
            return self._edge(node, axes)
        gathered = gather_of(node)
        if gathered is not None and is_float(node):
            at = self._node(gathered[1], shape_of(gathered[0])[0])
            return self._read(gathered[0], *at, axes)
        target: Any = node.target
        args: Any = node.args
        if node.op != "call_function" or not args:
            return self._edge(node, axes)
        if target in SAME:
            return self.of(args[0], axes)
        if target is edge_product:
            return self._product(args, axes)
        if target in VIEWS:
            inner = axes_before(node, axes)
            return self._edge(node, axes) if inner is None else self.of(args[0], inner)
        if target in FILLED and isinstance(value := _filling(node), int | float):
            if dtype_of(node) == torch.bool:
                return f"T.bool({bool(value)})"
            return number(value if node.meta["val"].is_floating_point() else int(value))
        every = self.tensors, self.operands, self.orders, self.others, self.counts
        before = [len(read) for read in every]
        text = self._pointwise(node, axes)
        if text is None or len(text) > LONGEST and not root:
            for read, count in zip(every, before, strict=True):
                del read[count:]
            return self._edge(node, axes)
        return text

    def _pointwise(self, node: fx.Node, axes: Sequence[int | None]) -> str | None:
        """The expression of a pointwise operator; None for other operators."""
        target: Any = node.target
        args: Any = node.args
        if target in CASTS and is_float(node) and is_float(args[0], (torch.bool, *DTYPES)):
            return self._float(args[0], axes, node)
        if target in LOGICAL and all(dtype_of(a) == torch.bool for a in args):
            return LOGICAL[target].format(*(self._truth(a, axes, node) for a in args))
        known = formula_of(node)
        # Comparisons give bools; other operators must give numbers.
        if known is None or not is_float(node, (torch.bool,) if target in COMPARED else DTYPES):
            return None
        truths = {aten.where.self: 0, aten.masked_fill.Scalar: 1}.get(target)
        read = [
            self._truth(a, axes, node) if n == truths else self._float(a, axes, node)
            for n, a in enumerate(known[1])
        ]
        return filled(known[0], *read)

    def _float(self, value: fx.Node | float, axes: Sequence[int | None], of: fx.Node) -> str:
        """The expression of an operator's argument as a number."""
        if not isinstance(value, fx.Node):
            return number(value)
        text = self._argument(value, axes, of)
        is_truth = dtype_of(value) == torch.bool
        return f"T.Select({self._asked(value, text)}, {ONE}, {ZERO})" if is_truth else text

    def _truth(self, value: fx.Node, axes: Sequence[int | None], of: fx.Node) -> str:
        return self._asked(value, self._argument(value, axes, of))

    def _asked(self, value: fx.Node, text: str) -> str:
        """The expression of a bool, which tensors hold as a number."""
        return f"({text} != {ZERO})" if text.startswith("{") else text

    def _argument(self, value: fx.Node, axes: Sequence[int | None], of: fx.Node) -> str:
        """The expression of an argument, possibly broadcast over edges or features."""
        sizes, whole = shape_of(value), shape_of(of)
        if dtype_of(value) is None:
            raise Stored(value)
        if len(sizes) == len(whole) and not is_one(
            sizes[0]
        ):  # edges, whatever their size is called
            inner = [None if is_one(s) else a for s, a in zip(sizes[1:], axes, strict=True)]
            return self.of(value, inner)
        behind = list(axes)[len(axes) - len(sizes) :] if sizes and len(sizes) <= len(axes) else axes
        if len(sizes) == len(whole):
            behind = [None, *axes]
        inner = [
            None if is_one(s) else a for s, a in zip(sizes, behind if sizes else [], strict=True)
        ]
        return self._read(value, "all", 0, inner)

    def _product(self, args: Sequence[fx.Node], axes: Sequence[int | None]) -> str:
        """The expression of an :func:`edge_product`."""
        x, weights, *bias = args
        size: Any = shape_of(x)[1]
        vector = self._operand(x, "edge", GIVEN, [-size])
        text = self._read(weights, "all", 0, [-size, *axes], vector)
        return f"({text} + {self._read(bias[0], 'all', 0, axes)})" if bias else text

    def _node(self, index: fx.Node, count: Size) -> tuple[str, int]:
        """The kind and number of an index into `count` nodes: that of the rows, or another."""
        if index is self.rows and (self.count is None or same(count, self.count)):
            self.count = count
            return "row", 0
        for n, (other, known) in enumerate(zip(self.others, self.counts, strict=True)):
            if other is index and same(known, count):
                return "other", n
        self.others.append(index)
        self.counts.append(count)
        return "other", len(self.others) - 1

    def _edge(self, node: fx.Node, axes: Sequence[int | None]) -> str:
        return self._read(node, "edge", GIVEN, axes)

    def _read(self, *operand: Any) -> str:
        """The expression of an :meth:`_operand`."""
        return f"{{{self._operand(*operand)}}}"

    def _operand(
        self, node: fx.Node, at: str, number: int, axes: Sequence[int | None],
        times: int | None = None,
    ) -> int:  # fmt: skip
        """The number of an operand, which is new unless one reads the same."""
        if not is_float(node, (torch.bool, *DTYPES)):
            raise Stored(node)
        dtype: Any = dtype_of(node)
        if dtype == torch.float64:
            self.dtype = dtype
        stored = DTYPES.get(dtype, "float32")  # for bools
        operand = Operand(at, number, tuple(axes), stored, times)
        for n, (tensor, other) in enumerate(zip(self.tensors, self.operands, strict=True)):
            if tensor is node and other == operand:
                return n
        self.tensors.append(node)
        self.operands.append(operand)
        self.orders.append(self.stored.get(node) if at == "edge" else None)
        return len(self.operands) - 1

    def finished(self, text: str) -> Finished:
        """Combine an expression of :meth:`of` with the tensors and indices that it reads."""
        indices = [*([] if self.rows is None else [self.rows]), *self.others]
        indices += dict.fromkeys(x for x in self.orders if x is not None and x not in indices)
        operands = [
            x if order is None else replace(x, number=indices.index(order))
            for x, order in zip(self.operands, self.orders, strict=True)
        ]
        others, dtype = len(self.others), DTYPES[self.dtype]
        return Finished(text, tuple(operands), self.tensors, indices, others, dtype)


def _filling(node: fx.Node) -> Any:
    """The number that a tensor is filled with."""
    target: Any = node.target
    value = FILLED[target]
    return node.args[1] if value is None and len(node.args) > 1 else value


def is_zero(node: fx.Node) -> bool:
    """Whether a tensor is filled with zeros."""
    node = unviewed(node)
    return node.op == "call_function" and node.target in FILLED and _filling(node) == 0


def axes_before(view: fx.Node, axes: Sequence[int | None]) -> list[int | None] | None:
    """The loops of a view's argument; None if the view splits or merges dimensions."""
    before, after = shape_of(view.args[0]), shape_of(view)
    if not before or not after:
        return None
    if view.target == aten.expand.default:
        if len(before) != len(after) or is_one(before[0]):
            return None
        return [None if is_one(s) else a for s, a in zip(before[1:], axes, strict=True)]
    if not same(before[0], after[0]):
        return None
    left = [n for n, s in enumerate(before) if n and not is_one(s)]
    right = [n for n, s in enumerate(after) if n and not is_one(s)]
    if len(left) != len(right) or any(
        not same(before[a], after[b]) for a, b in zip(left, right, strict=True)
    ):
        return None
    loops: list[int | None] = [None] * (len(before) - 1)
    for a, b in zip(left, right, strict=True):
        loops[a - 1] = axes[b - 1]
    return loops
