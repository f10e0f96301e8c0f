"""Reuse of the memory of dead values in place of new memory.

Outside regions each torch operator fills new memory: for large features most of its time goes into
new pages. Graphs are functional, so that all readers of a value are known. (Zen 5, one thread,
training with 20,000 nodes, 600,000 edges and 64 features: 0.9 of the time and 60 MB less for
SAGEConv, 0.95 for GATConv, 1.0 for GCNConv.)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from sparsetir.graph.expressions import SAME, VIEWS, aten, dtype_of, same, same_shape, shape_of
from sparsetir.graph.operator import RUNNERS, clear, cleared

# In-place operators, by their functional counterparts.
IN_PLACE: dict[Any, Any] = {
    aten.add.Tensor: aten.add_.Tensor, aten.clamp_min.default: aten.clamp_min_.default,
    aten.div.Scalar: aten.div_.Scalar, aten.div.Tensor: aten.div_.Tensor,
    aten.elu.default: aten.elu_.default, aten.leaky_relu.default: aten.leaky_relu_.default,
    aten.mul.Scalar: aten.mul_.Scalar, aten.mul.Tensor: aten.mul_.Tensor,
    aten.neg.default: aten.neg_.default, aten.relu.default: aten.relu_.default,
    aten.sigmoid.default: aten.sigmoid_.default, aten.sub.Tensor: aten.sub_.Tensor,
    aten.tanh.default: aten.tanh_.default, cleared: clear,
}  # fmt: skip
COMMUTE = {aten.add.Tensor, aten.mul.Tensor}
PRODUCTS = {aten.addmm.default, aten.addmm_.default, aten.mm.default}
# Operators whose results have memory of their own.
FRESH = {
    *IN_PLACE, *IN_PLACE.values(), *PRODUCTS, aten.bmm.default, aten.threshold_backward.default,
    aten.threshold_backward.grad_input, *RUNNERS,
}  # fmt: skip
WRITTEN = {*IN_PLACE.values(), aten.addmm_.default}
SIZED = {aten.view.default, aten.reshape.default}
SHARED = (VIEWS | SAME) - {aten.clone.default, aten.expand.default}


def reuse_memory(graph: fx.Graph) -> None:
    """Make operators write to an argument that they alone read, and products add to it."""
    for node in list(graph.nodes):
        if node.target == aten.add.Tensor and node.kwargs.get("alpha", 1) == 1:
            _add_product(graph, node)
        if node.target in IN_PLACE:
            _write_to_first(node)
        elif node.target == aten.threshold_backward.default and _is_free(node.args[0], node):
            node.target = aten.threshold_backward.grad_input
            node.kwargs = {"grad_input": node.args[0]}
    (output,) = graph.find_nodes(op="output")
    for result in {n for n in output.all_input_nodes if n.target in WRITTEN}:
        _own_memory(graph, result)


def _own_memory(graph: fx.Graph, result: Any) -> None:
    """Return a result written to a view as a tensor of its own, as its reader may write to it."""
    while result.target in WRITTEN:
        result = result.args[0]
    if result.target in SIZED:
        result.target = aten._unsafe_view.default
    elif result.target in SHARED:
        with graph.inserting_after(result):
            copy = graph.call_function(aten.clone.default, (result,))
        result.replace_all_uses_with(copy, lambda user: user is not copy)


def _add_product(graph: fx.Graph, node: fx.Node) -> None:
    """Fuse `a + x @ y` into one product that starts from `a`."""
    args: Any = node.args
    for a, product in (args[:2], args[1::-1]):
        is_product = isinstance(product, fx.Node) and product.target == aten.mm.default
        alone = is_product and product is not a and len(product.users) == 1
        if alone and _fits(a, node) and dtype_of(product) == dtype_of(node):
            node.target = aten.addmm_.default if _is_free(a, node) else aten.addmm.default
            node.args = (a, *product.args)
            graph.erase_node(product)
            return


def _write_to_first(node: fx.Node) -> None:
    ways: list[Any] = [node.args]
    if node.target in COMMUTE and node.kwargs.get("alpha", 1) == 1:
        ways.append((*node.args[1::-1], *node.args[2:]))
    for args in ways:
        if _is_free(args[0], node):
            node.target, node.args = IN_PLACE[node.target], args
            return


def _fits(value: Any, node: fx.Node) -> bool:
    """Whether a value has the shape, strides and type of a node's result."""
    if not (shape_of(node) and same_shape(value, node) and dtype_of(value) == dtype_of(node)):
        return False
    return all(map(same, value.meta["val"].stride(), node.meta["val"].stride()))


def _is_free(value: Any, reader: fx.Node) -> bool:
    """Whether a value is in memory that only one node reads."""
    if not _fits(value, reader):
        return False
    while set(value.users) == {reader}:
        if value.target not in SHARED:
            return value.op == "call_function" and value.target in FRESH
        reader, value = value, value.args[0]
    return False
