"""The part of a graph that depends on edges alone, run once for each tensor of edges.

PyG computes self loops, degrees, norms of GCN and counts of a mean in each step, though they depend
on neither features nor parameters. The graph is functional: nothing in it writes to memory, so that
a part of it may be computed at another time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from sparsetir.graph.expressions import SAME, SMALL, VIEWS, aten, dtype_of, first, shape_of
from sparsetir.graph.operator import INDEXED
from sparsetir.ops.cache import is_private, kept, private

INDICES = (torch.int32, torch.int64)
OF_MAIN = "sparsetir.of_main"  # marks nodes that stay out of preludes
Test = Callable[[fx.Node], bool]


class Part:
    """A connected part of the prelude, which depends on some tensors of edges.

    computed, results : names of its operators, and of its results
    runs : number of runs
    """

    def __init__(self, whole: fx.GraphModule, inside: set[fx.Node]) -> None:
        nodes = list(whole.graph.nodes)
        places = [n for n in nodes if n.op == "placeholder"]
        arguments = [n for n in places if n in inside or _is_size(n) and n.users.keys() & inside]
        computed = [n for n in nodes if n in inside and n.op == "call_function"]
        self.nodes = [n for n in computed if n.users.keys() - inside]
        self._given = [places.index(n) for n in arguments]
        self._module = _part(whole, arguments, inside, tuple(self.nodes))
        self.computed = [n.name for n in self._module.graph.nodes if n.op == "call_function"]
        self.results = [n.name for n in self.nodes]
        self.runs = 0
        # The key of cached results, which layers that are compiled one by one share.
        self._key = _text(self._module.graph)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "nodes": []}

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """The part's results for the arguments of the whole graph."""
        arguments = [args[n] for n in self._given]
        edges = [x for x in arguments if isinstance(x, Tensor)]
        key = self._key, *(x for x in arguments if not isinstance(x, Tensor))
        results = kept.find(key, *edges)
        if results is None or not all(is_private(x) for x in results if isinstance(x, Tensor)):
            results = kept.remember(key, lambda: self._made(arguments), *edges)
        return results

    def _made(self, inputs: list[Any]) -> list[Any]:
        self.runs += 1
        memory = {x.untyped_storage()._cdata for x in inputs if isinstance(x, Tensor)}

        def kept(x: Any) -> Any:
            # A new tensor is not copied: the main graph reads it with these strides.
            is_new = isinstance(x, Tensor) and x.untyped_storage()._cdata not in memory
            return private(x, is_new) if isinstance(x, Tensor) else x

        return [kept(x) for x in self._module.forward(*inputs)]


class Prelude:
    """The parts of a graph that depend on edges alone, and the rest.

    main : the rest, which takes results of the parts after its arguments
    """

    def __init__(self, whole: fx.GraphModule, groups: list[set[fx.Node]]) -> None:
        nodes, inside = list(whole.graph.nodes), set[fx.Node]().union(*groups)
        places = [n for n in nodes if n.op == "placeholder"]
        rest = [n for n in places if n not in inside or n.users.keys() - inside]
        self._rest = [places.index(n) for n in rest]
        self.parts = [Part(whole, group) for group in groups]
        results = [n for part in self.parts for n in part.nodes]
        self.main = _part(whole, [*rest, *results], set(nodes) - inside, nodes[-1].args[0])

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Compute the arguments of :attr:`main` from those of the whole graph."""
        arguments = [args[n] for n in self._rest]
        for part in self.parts:
            arguments += part(args)
        return arguments


def split(whole: fx.GraphModule, is_edges: Test, results: int) -> Prelude | None:
    """The prelude of a graph for placeholders that may describe edges; None if it would be empty.

    results : number of the caller's results; further ones are saved for the backward pass
    """
    inside, alone = edge_dependents(whole.graph, is_edges)
    # Views, which are free, stay with their readers, except views of arguments of regions.
    for node in reversed(whole.graph.nodes):
        readers = node.users.keys()
        of_argument = base_of(node).op == "placeholder" and node.target != aten.expand.default
        is_index = of_argument and any(u.target in INDEXED for u in readers)
        if node.target in VIEWS | SAME and not is_index and not readers & inside:
            inside.discard(node)
    _read_arguments(whole.graph, inside, results)
    computed = {n for n in inside if n.op == "call_function"}
    inside -= {n for n in inside - computed if not n.users.keys() & computed}
    inside |= _copied(whole.graph, computed, alone)
    groups = _groups([n for n in whole.graph.nodes if n in inside])
    return Prelude(whole, groups) if groups else None


def _groups(nodes: list[fx.Node]) -> list[set[fx.Node]]:
    """Connected groups of nodes; constants belong to their readers."""
    groups: list[set[fx.Node]] = []
    for node in nodes:
        near = {node, *node.all_input_nodes}
        touched = [g for g in groups if g & near]
        groups = [g for g in groups if not g & near] + [set().union({node}, *touched)]
    return groups


def _read_arguments(graph: fx.Graph, inside: set[fx.Node], results: int) -> None:
    """Make the main graph read arguments, and views of them, in the caller's memory, as it may
    write to them; regions read the prelude's copies, also in a backward pass."""
    (output,) = graph.find_nodes(op="output")
    views = dict[fx.Node, fx.Node]()
    for node in [n for n in graph.nodes if n in inside]:
        base = base_of(node)
        if base.op != "placeholder":
            continue
        views[base] = base
        readers = [u for u in node.users if u not in inside]
        regions = [u for u in readers if u.target in INDEXED]
        kept = node
        if regions and node is base:
            with graph.inserting_after(node):
                kept = graph.call_function(aten.alias.default, (node,))
            kept.meta = dict(node.meta)
            inside.add(kept)
            for user in regions:
                user.replace_input_with(node, kept)
        for user in readers:
            if user is output and regions:
                outputs = list(output.args[0])
                for n, x in enumerate(outputs):
                    if x is node:
                        outputs[n] = _viewed(graph, node, views) if n < results else kept
                output.args = (type(output.args[0])(outputs),)
            elif user not in regions:
                user.replace_input_with(node, _viewed(graph, node, views))


def copy_results(graph: fx.Graph, count: int, is_edges: Test) -> None:
    """Copy those of the first results that a prelude caches, as the caller may write to them.

    Results that share memory become views of one copy. Results of different operators that were
    merged into one tensor become two again.
    """
    inside, _ = edge_dependents(graph, is_edges)
    (output,) = graph.find_nodes(op="output")
    results, views = list(output.args[0]), dict[fx.Node, fx.Node]()
    owners = dict[Any, fx.Node]()
    for n, node in enumerate(results[:count]):
        if not isinstance(node, fx.Node) or dtype_of(node) is None:  # a number
            continue
        base = base_of(node)
        memory = base.args if base.target is operator.getitem else base
        merged = owners.setdefault(memory, base) is not base
        if base.op != "call_function" or not merged and base not in inside:
            continue
        if base not in views:
            with graph.inserting_after(base):  # so that it is part of the forward graph
                views[base] = graph.call_function(aten.clone.default, (base,))
            views[base].meta = {**base.meta, OF_MAIN: True}
        results[n] = _viewed(graph, node, views)
    output.args = (type(output.args[0])(results),)


def base_of(node: fx.Node) -> fx.Node:
    """The node whose memory a node shares; itself if it has memory of its own."""
    while node.op == "call_function" and (before := _viewed_node(node)) is not None:
        node = before
    return node


def _viewed_node(node: fx.Node) -> fx.Node | None:
    """The node that a node is a view of, or an element of whose views it is; else None."""
    schema: Any = getattr(node.target, "_schema", None)
    if node.target is operator.getitem:
        return first(node) if _viewed_node(first(node)) is not None else None
    if schema is None or schema.is_mutable:
        return None
    shares = bool(schema.returns and schema.returns[0].alias_info)
    return first(node) if shares or node.target in VIEWS else None


def _viewed(graph: fx.Graph, node: fx.Node, views: dict[fx.Node, fx.Node]) -> fx.Node:
    """Repeat a view, outside preludes, on the replacement that `views` has for its base."""
    if node not in views:
        before = first(node)
        other = _viewed(graph, before, views)
        with graph.inserting_after(node):
            views[node] = graph.node_copy(node, lambda a: other if a is before else a)
        views[node].meta[OF_MAIN] = True
    return views[node]


def is_of_edges(places: Sequence[fx.Node]) -> Test:
    """A test for placeholders without gradients that may describe edges: integers, bools, and
    floats with one number, or a few, per edge."""
    indices = [s for n in places if dtype_of(n) in INDICES and (s := shape_of(n))]
    lengths = {str(s[-1]) for s in indices}
    # Vectors do not count, as they may have a number for each node.
    pairs = {str(s[1]) for s in indices if len(s) == 2 and s[0] == 2}

    def test(node: fx.Node) -> bool:
        dtype, sizes = dtype_of(node), shape_of(node)
        if node not in places or dtype is None or node.meta["val"].device.type != "cpu":
            return False
        if dtype in (*INDICES, torch.bool):
            return len(sizes) > 0  # scalars are counters
        if len(sizes) == 1:
            return str(sizes[0]) in lengths
        few = len(sizes) == 2 and isinstance(sizes[1], int) and sizes[1] <= SMALL
        return few and str(sizes[0]) in pairs

    return test


def edge_dependents(graph: fx.Graph, is_edges: Test) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes that depend on edges alone, and those that depend on no tensor at all."""
    inside, alone = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        of = set(node.all_input_nodes)
        if node.op == "placeholder":
            (inside if is_edges(node) else alone if _is_size(node) else set()).add(node)
        elif node.op != "call_function" or acts(node):
            continue
        elif node.target in INDEXED or OF_MAIN in node.meta:
            continue
        elif of <= alone:
            alone.add(node)
        elif of <= inside | alone:
            inside.add(node)
    return inside, alone


def acts(node: fx.Node) -> bool:
    """Whether an operator draws random numbers, or writes to its arguments."""
    tags, schema = getattr(node.target, "tags", ()), getattr(node.target, "_schema", None)
    return torch.Tag.nondeterministic_seeded in tags or bool(schema and schema.is_mutable)


def _is_size(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "placeholder" and isinstance(value, torch.SymInt | int)


def _copied(graph: fx.Graph, nodes: set[fx.Node], alone: set[fx.Node]) -> set[fx.Node]:
    """Copy the constants that some nodes read, as other nodes may read them, too."""
    copies = dict[fx.Node, fx.Node]()

    def copy(node: fx.Node) -> fx.Node:
        if node not in alone or node.op == "placeholder":
            return node
        if node not in copies:
            with graph.inserting_before(node):
                copies[node] = graph.node_copy(node, copy)
        return copies[node]

    for node in nodes:
        node.args = map_arg(node.args, copy)
        node.kwargs = map_arg(node.kwargs, copy)
    return set(copies.values())


def _text(graph: fx.Graph) -> Hashable:
    """A text that is equal for graphs that compute the same results; an object of its own for one
    with constants."""
    if graph.find_nodes(op="get_attr"):
        return object()  # an id could be reused
    numbers = {node: f"%{n}" for n, node in enumerate(graph.nodes)}
    lines = (
        (n.op, str(n.target), map_arg((n.args, n.kwargs), numbers.get))
        for n in graph.nodes
        if n.op != "placeholder"
    )
    return str([len(graph.find_nodes(op="placeholder")), *lines])


def _part(
    whole: fx.GraphModule, arguments: list[fx.Node], nodes: set[fx.Node], results: Any
) -> fx.GraphModule:
    """Make a graph of some nodes of another one, with its arguments and results."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in arguments:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in whole.graph.nodes:
        if node in nodes and node not in copies and node.op not in ("output", "placeholder"):
            copies[node] = graph.node_copy(node, lambda a: copies[a])
    graph.output(map_arg(results, lambda a: copies[a]))
    graph.eliminate_dead_code()
    return fx.GraphModule(whole, graph)
