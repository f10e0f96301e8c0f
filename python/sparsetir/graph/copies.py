"""Removal of copies that torch makes of values which nothing writes to.

Graphs are functional, so a copy with the strides of its original can be replaced by it; a dropout
of probability 0 makes one. Torch puts the gradient of each part of a tensor into zeros of its size
and adds these up; where parts fill the tensor, they are concatenated instead, in the order of
dimensions in which the result is read. (Zen 5, one thread, training of an attention layer whose
queries, keys and values are parts of one product: 0.83 of the time.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx

from sparsetir.graph.expressions import aten, first, same, same_shape, shape_of
from sparsetir.graph.prelude import base_of

# Operators for the gradient of a part along a dimension, and whether the part has that dimension.
PARTS: dict[Any, bool] = {aten.select_backward.default: False, aten.slice_backward.default: True}
# Operators that only reorder dimensions, with functions for the new position of a dimension.
MOVED: dict[Any, Callable[[int, int, Any], int]] = {
    aten.permute.default: lambda dim, rank, order: [d % rank for d in order].index(dim),
    aten.squeeze.dim: lambda dim, rank, at: dim - (at % rank < dim),
    aten.transpose.int: lambda dim, rank, ends: (
        ends[1] if dim == ends[0] else ends[0] if dim == ends[1] else dim
    ),
    aten.unsqueeze.default: lambda dim, rank, at: dim + (at % (rank + 1) <= dim),
}


def remove_copies(graph: fx.Graph) -> None:
    """Replace copies by their originals, and sums of gradients of parts by concatenations."""
    for node in graph.find_nodes(op="call_function", target=aten.slice_backward.default):
        # Torch leaves out a slice that is the whole, as in `x[:, 0]`, but not its gradient.
        if same_shape(first(node), node):
            node.target, node.args = aten.clone.default, (first(node),)
            node.kwargs = {"memory_format": torch.contiguous_format}
    (output,) = graph.find_nodes(op="output")
    # The caller may write to results and to arguments.
    held = set(map(base_of, output.all_input_nodes))
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        original, base = first(node), base_of(first(node))
        alone = base.op == "call_function" and not held & {node, base}
        if alone and all(map(same, _strides(original), _strides(node))):
            node.replace_all_uses_with(original)
    for node in reversed(list(graph.nodes)):
        if node.target == aten.add.Tensor and node.users:
            _concatenate(graph, node)
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        _in_order_of_reader(graph, node)
    graph.eliminate_dead_code()


def _strides(node: fx.Node) -> tuple[Any, ...]:
    return node.meta["val"].stride()


def _concatenate(graph: fx.Graph, root: fx.Node) -> None:
    """Replace a sum of gradients of parts that fill a dimension."""
    parts, left = list[fx.Node](), list[Any]([root])
    while left:
        node = left.pop()
        if not isinstance(node, fx.Node):  # a number
            return
        if node.target == aten.add.Tensor and node.kwargs.get("alpha", 1) == 1:
            if node is not root and len(node.users) > 1:
                return
            left += node.args
        elif node.target in PARTS and same_shape(node, root):
            parts.append(node)
        else:
            return
    shape = shape_of(root)
    dim, *others = {cast(int, x.args[2]) % len(shape) for x in parts}
    size = shape[dim]
    if others or not isinstance(size, int):
        return
    intervals = sorted(((_interval(x, size), x) for x in parts), key=lambda pair: pair[0])
    ends = [0, *(end for (_, end), _ in intervals)]
    if [begin for (begin, _), _ in intervals] != ends[:-1] or ends[-1] != size:
        return
    with graph.inserting_before(root):
        pieces = [
            first(x) if PARTS[x.target] else _view(graph, aten.unsqueeze.default, first(x), dim)
            for _, x in intervals
        ]
        _put(graph, root, pieces, dim)


def _interval(part: fx.Node, size: int) -> tuple[int, int]:
    """The part's begin and end along its dimension; (-1, -1) if it is not an interval."""
    at: Any = part.args[3:]
    if not all(isinstance(x, int) for x in at):
        return -1, -1
    if not PARTS[part.target]:
        return at[0] % size, at[0] % size + 1
    begin, end, step = slice(*at).indices(size)
    return (begin, end) if step == 1 else (-1, -1)


def _in_order_of_reader(graph: fx.Graph, whole: fx.Node) -> None:
    """Concatenate parts in the order of dimensions of a contiguous copy, if only that is read."""
    views, node = list[fx.Node](), whole
    args: Any = whole.args
    pieces, dim = args[0], args[1] if len(args) > 1 else 0
    dim %= len(shape_of(whole))
    if any(len(shape_of(x)) != len(shape_of(whole)) for x in pieces):  # empty vectors are left out
        return
    while len(node.users) == 1:
        (node,) = node.users
        if node.target == aten.contiguous.default:
            continue
        if node.target not in MOVED:
            break
        rank, at = len(shape_of(first(node))), list[Any](node.args[1:])
        if node.target == aten.squeeze.dim and at[0] % rank == dim:
            return
        ends = [d % rank for d in at] if node.target == aten.transpose.int else at[0]
        dim = MOVED[node.target](dim, rank, ends)
        views.append(node)
    if not views or node.target != aten.clone.default:
        return
    if node.kwargs.get("memory_format") != torch.contiguous_format:
        return
    with graph.inserting_before(node):
        for view in views:
            pieces = [_view(graph, view.target, piece, *view.args[1:]) for piece in pieces]
        _put(graph, node, pieces, dim)


def _put(graph: fx.Graph, node: fx.Node, pieces: list[fx.Node], dim: int) -> None:
    """Insert the concatenation in place of a contiguous value."""
    whole = graph.call_function(aten.cat.default, (pieces, dim))
    # It has the order of dimensions that the pieces have in memory.
    result = graph.call_function(aten.contiguous.default, (whole,))
    whole.meta = result.meta = dict(node.meta)
    node.replace_all_uses_with(result)


def _view(graph: fx.Graph, target: Any, x: fx.Node, *args: Any) -> fx.Node:
    """Insert a view of a value by an operator that takes numbers."""
    view = graph.call_function(target, (x, *args))
    view.meta = {**x.meta, "val": target(x.meta["val"], *args)}
    return view
