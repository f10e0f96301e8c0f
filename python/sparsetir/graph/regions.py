"""Regions of a torch graph, which become one kernel each, and the graph that calls them.

A region ends in a reduction at nodes (`scatter_add`, `index_add`, accumulating `index_put`,
`scatter_reduce`), in a sum over all edges, or in edge values that something else reads. From there
the graph is followed back to the tensors that are read: rows of nodes, edge values, small tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from sparsetir.graph.expressions import (
    COSTLY,
    POINTWISE,
    SAME,
    SMALL,
    VIEWS,
    Expression,
    Size,
    Stored,
    aten,
    axes_before,
    axes_of,
    dims_of,
    dtype_of,
    edge_product,
    first,
    gather_of,
    index_of,
    is_cast,
    is_float,
    is_one,
    is_zero,
    kept_axes,
    module_of,
    same,
    same_shape,
    shape_of,
    unviewed,
    wide,
)
from sparsetir.graph.factors import product, scaled, split
from sparsetir.graph.operator import (
    RUNNERS,
    cleared,
    in_order,
    number_of,
    region,
    region_product,
    restored,
)
from sparsetir.graph.prelude import acts
from sparsetir.graph.products import untransposed
from sparsetir.graph.programs import Program
from sparsetir.ops.tensors import DTYPES
from sparsetir.reductions import EXTREMA, REDUCTION_NAMES

UNKNOWN = 64  # size assumed for an unknown dimension
WIDER = 4  # readers with this many times a value's features read it from memory
WORTH = 4  # least operations of an edge value that is stored for its readers
NARROW = 8  # most features of a value that is stored for several reductions
FEW = 1 << 20  # or, if the number of edges is known, its most numbers in all
# A number of features below this, or a multiple of it, is compiled into the kernel: compiling takes
# a tenth of the time, for the same speed. Others are faster in a kernel for any number.
LANES = 8
SHORT = 4  # with fewer features, each loops over the edges of a row
REDUCTIONS = {
    aten.index_add.default,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
    aten.index_reduce.default,
}
SCATTERED = {aten.scatter_add.default, aten.scatter_reduce.two}
UNDEFINED = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default}
EQUAL = {aten.eq.Tensor, aten.ne.Tensor}
SUMS = {aten.sum.dim_IntList, aten.sum.default}


SORTED = {*RUNNERS, in_order}  # operators that read values of edges in any order
# Of the node that another one replaces: its part of the graph, and where it stems from.
KEPT_META = {"partitioner_tag", "stack_trace", "nn_module_stack", "fwd_nn_module_stack"}
FOUND = "sparsetir.found"  # the key in `meta` of nodes that are regions


@dataclass(frozen=True)
class Found:
    """A region that was found.

    node : name of the node of the graph that it replaces
    program : its program
    shape : shape of its result, as text
    module : name of the module that it stems from, "" for none
    """

    node: str
    program: Program
    shape: str
    module: str


@dataclass(frozen=True)
class Reduction:
    """A reduction of edge values at an index of nodes, added to `base` unless that is None."""

    base: fx.Node | None
    index: fx.Node
    values: fx.Node
    reduce: str


def rewrite(
    module: fx.GraphModule,
    of_edges: Callable[[fx.Graph], set[fx.Node]],
    factors: bool = True,
    products: bool = True,
) -> tuple[list[Found], list[str]]:
    """Replace regions by calls of the operator; return the regions, and what was left and why.

    of_edges : returns the nodes of a graph that depend on edges alone, for the prelude to compute
    factors : whether to hoist factors of nodes out of sums at them
    products : whether products of a few numbers per edge and a matrix become parts of regions
    """
    _drop_whole_slices(module.graph)
    _drop_double_transposes(module.graph)
    _merge_equal(module.graph)
    _name_sizes_once(module.graph)
    _read_sizes_of_indices(module.graph)
    _merge_equal(module.graph)
    finder = _Finder(module.graph, of_edges(module.graph), factors, products)
    finder.run()
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return finder.found, finder.left()


def _drop_whole_slices(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.slice.Tensor):
        value = first(node)
        if len(node.args) < 5 and same_shape(value, node):
            node.replace_all_uses_with(value)
            graph.erase_node(node)


def _drop_double_transposes(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.t.default):
        if first(node).target == aten.t.default:
            node.replace_all_uses_with(first(first(node)))
            graph.erase_node(node)


def _merge_equal(graph: fx.Graph) -> None:
    """Compute equal values once, except results, which stay separate tensors.

    Torch's own pass imports Inductor, which takes seconds.
    """
    (output,) = graph.find_nodes(op="output")
    results = {memory for x in output.all_input_nodes if (memory := _memory_of(x))}
    equal: dict[Any, fx.Node] = {}
    writes = 0  # values are only equal if no write is between them
    for node in [n for n in graph.nodes if n.op == "call_function"]:
        schema = getattr(node.target, "_schema", None)
        writes += bool(schema and schema.is_mutable)
        if acts(node) or node.target in UNDEFINED or _memory_of(node) in results:
            continue
        key = writes, node.target, _key_of(node.args), _key_of(node.kwargs)
        same_value = equal.setdefault(key, node)
        if same_value is not node:
            node.replace_all_uses_with(same_value)
            graph.erase_node(node)


def _memory_of(node: fx.Node) -> int | None:
    """An identifier of the memory of a node's value; None if it is not a tensor."""
    value = node.meta.get("val")
    try:
        return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
    except NotImplementedError:
        return None


def _key_of(argument: Any) -> Any:
    """A key that is equal for equal arguments of a node; 1, 1.0 and True differ."""
    if isinstance(argument, list | tuple):
        return "list", *map(_key_of, argument)
    if isinstance(argument, dict):
        return "dict", *((name, _key_of(x)) for name, x in argument.items())
    if isinstance(argument, slice):
        return "slice", *map(_key_of, (argument.start, argument.stop, argument.step))
    if isinstance(argument, float | torch.SymInt | torch.SymFloat | torch.SymBool):
        return type(argument), str(argument)  # 0.0 and -0.0 differ
    return type(argument), argument


def _name_sizes_once(graph: fx.Graph) -> None:
    """Give each number of edges one name.

    Two layers that remove self loops keep the same edges, but torch names the data-dependent number
    of them anew in each layer.
    """
    names: dict[str, Size] = {}
    for node in graph.nodes:
        sizes = shape_of(node)
        if not sizes or isinstance(sizes[0], int) and node.op == "placeholder":
            continue
        gathered, reduction = gather_of(node), reduction_of(node, named=False)
        if gathered is not None:
            _rename(names, sizes[0], shape_of(gathered[1])[0])
        if reduction is not None:
            # More values may be scattered than there are indices, if both sizes are known.
            values, named = shape_of(reduction.values)[0], shape_of(reduction.index)[0]
            if node.target not in SCATTERED or free_unbacked_symbols((values, named)):
                _rename(names, values, named)
        if node.target in POINTWISE | VIEWS | SAME:
            for other in node.all_input_nodes:
                before = shape_of(other)
                if not before or is_one(before[0]):
                    continue  # it may be broadcast over edges
                same_rank = len(before) == len(sizes)
                # A view keeps the number of elements: if it keeps the width, it keeps the edges.
                view = node.target in VIEWS and width_of(other) == width_of(node)
                known = all(isinstance(s, int) for s in (*before[1:], *sizes[1:]))
                if view and known or node.target not in VIEWS and same_rank:
                    _rename(names, sizes[0], before[0])
    for node in graph.nodes:
        sizes = shape_of(node)
        if any(str(s) in names for s in sizes):
            named = [names.get(str(s), s) for s in sizes]
            node.meta["val"] = node.meta["val"].new_empty(named)


def _rename(names: dict[str, Size], size: Size, other: Size) -> None:
    """Record that two symbolic sizes are equal."""
    size, other = (names.get(str(s), s) for s in (size, other))
    if same(size, other) or isinstance(size, int) and isinstance(other, int):
        return
    if isinstance(size, int):
        size, other = other, size
    for name in [n for n, s in names.items() if same(s, size)]:
        names[name] = other
    names[str(size)] = other


def _read_sizes_of_indices(graph: fx.Graph) -> None:
    """Read numbers of edges from indices, and make constants without a tensor to take the type of,
    so that gathered tensors need not exist for these."""
    for node in list(graph.nodes):
        if node.target == aten.sym_size.int:
            gathered = gather_of(node.args[0])
            if gathered is not None and node.args[1] == 0:
                node.args = (gathered[1], 0)
        elif node.target in (aten.new_zeros.default, aten.new_ones.default):
            value = node.meta["val"]
            options = {"dtype": value.dtype, "device": value.device}
            fill = 0 if node.target == aten.new_zeros.default else 1
            with graph.inserting_before(node):
                full = graph.call_function(aten.full.default, (node.args[1], fill), options)
            full.meta = dict(node.meta)
            node.replace_all_uses_with(full)
            graph.erase_node(node)


def reduction_of(node: fx.Node, named: bool = True) -> Reduction | None:
    """The reduction of floats that a node computes, or None.

    named : whether equal sizes already have one name
    """
    if node.op != "call_function":
        return None
    target: Any = node.target
    args: Any = node.args
    rank = max(1, len(shape_of(node)))
    if target in (aten.scatter_add.default, aten.index_add.default) and not args[1] % rank:
        base, _, index, values, reduce = *args, "sum"
        if node.kwargs.get("alpha", 1) != 1:
            return None
    elif target == aten.index_put.default and len(args) > 3 and args[3]:
        base, indices, values, reduce = args[0], args[1], args[2], "sum"
        index = indices[0] if len(indices) == 1 else None
        if index is None or len(shape_of(index)) != 1:
            return None
    elif target == aten.scatter_reduce.two and not args[1] % rank:
        base, _, index, values, name = args
        reduce = REDUCTION_NAMES.get(str(name), "")
        included = node.kwargs.get("include_self", True)
        if reduce not in ("sum", *EXTREMA) or not (reduce == "sum" if included else is_zero(base)):
            return None
    else:
        return None
    rows = index_of(index)
    sizes, of_values = shape_of(node), shape_of(values)
    if rows is None or not is_float(values) or not is_float(node) or len(sizes) != len(of_values):
        return None
    # A scatter may read only some of the values, and a put may broadcast one.
    indexed = shape_of(index)
    if any(not same(a, b) for a, b in zip(indexed[1:], of_values[1:], strict=False)):
        return None
    if is_one(of_values[0]) != is_one(indexed[0]) or named and not same(of_values[0], indexed[0]):
        return None
    if any(not same(a, b) for a, b in zip(sizes[1:], of_values[1:], strict=True)):
        return None
    return Reduction(None if is_zero(base) else base, rows, values, reduce)


def _why_unknown(node: fx.Node) -> str:
    """Why a reduction at indices is none that :func:`reduction_of` knows."""
    if node.target == aten.scatter_reduce.two:
        name = str(node.args[4])
        if REDUCTION_NAMES.get(name, "") in EXTREMA:
            return f"{name!r} with initial values, not of torch.zeros with include_self=False"
        if REDUCTION_NAMES.get(name, "") != "sum":
            return f"{name!r} is not among the reductions that are known"
    return "of another form than those that are known"


def is_reduction(node: fx.Node) -> bool:
    """Whether an operator reduces at indices, in any form."""
    if node.target == aten.index_put.default:
        return len(node.args) > 3 and bool(node.args[3])
    return node.target in REDUCTIONS


def width_of(node: fx.Node) -> int:
    """The number of features of an edge."""
    return _width(shape_of(node))


def _width(shape: tuple[Size, ...]) -> int:
    return math.prod(s if isinstance(s, int) else UNKNOWN for s in shape[1:])


class _Finder:
    """A search for the regions of a graph, which it rewrites in one pass."""

    def __init__(
        self, graph: fx.Graph, of_edges: set[fx.Node], factors: bool, products: bool
    ) -> None:
        self.graph, self._of_edges_alone, self._products = graph, of_edges, products
        self.found: list[Found] = []
        self._why: dict[str, str] = {}
        self._move_views()
        self._merge_sums()
        nodes = [n for n in graph.nodes if n not in of_edges]
        vectors = [r.index for n in nodes if (r := reduction_of(n))]
        vectors += [g[1] for n in nodes if (g := gather_of(n)) and is_float(n)]
        self.sizes = {str(shape_of(v)[0]): v for v in vectors}
        if products:
            self._name_products()
            nodes = [n for n in graph.nodes if n not in of_edges]
        reductions = {n: r for n in nodes if (r := reduction_of(n))}
        self.reductions = reductions
        self.rows = list(dict.fromkeys(r.index for r in reductions.values()))
        self._counts = {r.index: shape_of(n)[0] for n, r in reductions.items()}  # numbers of nodes
        # Edge values that are read rather than recomputed, each with the index that sorts it; None
        # for the order of the caller.
        self.stored: dict[fx.Node, fx.Node | None] = dict.fromkeys(filter(is_float, of_edges))
        self.stored |= {n: None for n in nodes if self._is_sum(n) and 0 not in dims_of(n)}
        self._store_narrow_values(nodes)
        # Sums whose factors are hoisted, each with the index of its nodes and their number; and
        # the sums without these factors.
        self._apart: dict[fx.Node, tuple[fx.Node, Size]] = {}
        self._sums: dict[tuple[fx.Node, str, str, Any], fx.Node] = {}
        self._in_order: dict[tuple[fx.Node, fx.Node], fx.Node] = {}  # values sorted by rows
        if factors:
            self._take_factors_out(nodes)

    def run(self) -> None:
        """Find all regions."""
        for node in list(self.graph.nodes):
            if node in self._of_edges_alone:
                continue
            reduction = reduction_of(node)
            if reduction is not None:
                self._at_nodes(node, reduction)
            elif node in self.stored:
                self._replace_edges(node)
            elif self._is_sum(node):
                self._over_all_edges(node)
            elif node.target == aten.mm.default and self._products:
                self._gradient_of_product(node)
        self.graph.eliminate_dead_code()
        for node in list(self.graph.nodes):
            if self._is_pointwise(node) and any(not self._is_pointwise(u) for u in _readers(node)):
                self._replace_edges(node, given=True)  # in the order that existing regions read
        self._restore_products()
        self.graph.eliminate_dead_code()
        self._restore_order()

    def left(self) -> list[str]:
        """Gathers and reductions that remain in the graph, and why."""
        out = []
        for node in self.graph.nodes:
            kind = "reduction" if is_reduction(node) else "gather" if gather_of(node) else None
            dtype = dtype_of(node)
            if kind is None or dtype is None or node in self._of_edges_alone:
                continue
            why = self._why.get(node.name)
            if not dtype.is_floating_point:
                continue
            if not is_float(node):
                known = ", ".join(DTYPES.values())
                why = f"of {dtype} on {node.meta['val'].device.type}, not of {known} on a CPU"
            elif why is None and kind == "reduction":
                why = _why_unknown(node)
            elif why is None:
                why = "read by " + ", ".join(sorted({str(u.target) for u in node.users}))
            out.append(f"{kind} {node.name} {tuple(shape_of(node))}: {why}")
        return out

    # -- classification of nodes ------------------------------------------------------------------

    def _index_vector(self, node: fx.Node) -> fx.Node | None:
        """A vector of indices as long as the first dimension of a tensor."""
        sizes = shape_of(node)
        return self.sizes.get(str(sizes[0])) if sizes else None

    def _is_pointwise(self, node: fx.Node) -> bool:
        if node.op != "call_function" or node in self._of_edges_alone:
            return False
        if node.target not in POINTWISE and not is_cast(node):
            return False
        return is_float(node) and self._index_vector(node) is not None

    def _is_sum(self, node: fx.Node) -> bool:
        """Whether a node sums edge values, over the last features or over all edges."""
        if node.op != "call_function" or node.target not in SUMS or not is_float(node):
            return False
        values = first(node)
        if not is_float(values) or self._index_vector(values) is None:
            return False
        dims, rank = dims_of(node), len(shape_of(values))
        return 0 in dims or (bool(dims) and dims == list(range(rank - len(dims), rank)))

    def _name_products(self) -> None:
        """Replace products of a few numbers per edge and a wider matrix by :func:`edge_product`,
        with the matrix's columns reshaped in place of the product's."""
        for node in list(self.graph.nodes):
            if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
                continue
            *bias, x, weights = node.args
            if not all(map(is_float, (*node.args, node))) or not self._is_small(x):
                continue
            inner, columns = shape_of(weights)
            if not isinstance(columns, int) or columns <= inner:
                continue  # no wider than its operand
            if bias and shape_of(bias[0]) != (columns,):
                continue
            for view in list(node.users):
                split = shape_of(view)[1:]
                if view.target in VIEWS and split and math.prod(split) == columns:
                    self._name_product(view, node, x, weights, bias)
            self._name_product(node, node, x, weights, bias)

    def _name_product(
        self, view: fx.Node, node: fx.Node, x: fx.Node, weights: fx.Node, bias: list[fx.Node]
    ) -> None:
        """Replace a view of a product, or the product itself, by :func:`edge_product`."""
        if not same(shape_of(view)[0], shape_of(x)[0]):
            return
        split = list(shape_of(view)[1:])
        with self.graph.inserting_before(view):
            if view is not node:
                weights = self._reshaped(weights, [shape_of(x)[1], *split], view)
                bias = [self._reshaped(b, split, view) for b in bias]
            named = self._call(edge_product, (x, weights, *bias), view.meta["val"], view)
        view.replace_all_uses_with(named)

    def _restore_products(self) -> None:
        """Have torch compute the products that are read outside regions."""
        for node in self.graph.find_nodes(op="call_function", target=edge_product):
            if not node.users:
                continue
            x, weights, *bias = node.args
            columns = math.prod(shape_of(node)[1:])
            with self.graph.inserting_before(node):
                if len(shape_of(node)) != 2:
                    weights = self._reshaped(weights, [shape_of(x)[1], columns], node)
                    bias = [self._reshaped(b, [columns], node) for b in bias]
                target = aten.addmm.default if bias else aten.mm.default
                fake = node.meta["val"].new_empty([shape_of(x)[0], columns])
                out = self._call(target, (*bias, x, weights), fake, node)
                if len(shape_of(node)) != 2:
                    first_size = self._size(shape_of(node)[0], node)
                    sizes = [first_size, *shape_of(node)[1:]]
                    out = self._call(aten.view.default, (out, sizes), node.meta["val"], node)
            node.replace_all_uses_with(out)

    def _reshaped(self, value: fx.Node, shape: list[Any], like: fx.Node) -> fx.Node:
        fake = value.meta["val"].new_empty(shape)
        return self._call(aten.reshape.default, (value, shape), fake, like)

    def _is_small(self, x: fx.Node) -> bool:
        """Whether a node has few numbers for each edge, and does not gather from nodes."""
        sizes = shape_of(x)
        if len(sizes) != 2 or self._index_vector(x) is None or gather_of(x) is not None:
            return False
        return isinstance(sizes[1], int) and 0 < sizes[1] <= SMALL

    def _store_narrow_values(self, nodes: list[fx.Node]) -> None:
        """Store costly values that wider ones or several others read, and values that are compared
        for equality: their last bits must match those of the values that were computed from them.
        """
        work: dict[fx.Node, int] = {}
        reduced: dict[fx.Node, int] = {}
        for reduction in self.reductions.values():
            values = unviewed(reduction.values)
            reduced[values] = reduced.get(values, 0) + 1
        for node in filter(self._is_pointwise, nodes):
            costly = node.target in COSTLY
            # A gather counts as one operation, as it is costly by an index other than the rows'.
            work[node] = (WORTH if costly else 1) + sum(
                work.get(b, gather_of(b) is not None)
                for a in node.all_input_nodes
                if (b := unviewed(a)) not in self.stored
            )
            readers, width = list(_readers(node)), width_of(node)
            if any(u.target in EQUAL for u in readers):
                self.stored[node] = None
                continue
            wide = any(self._is_pointwise(u) and width_of(u) >= WIDER * width for u in readers)
            several = (len(readers) if costly else reduced.get(node, 0)) > 1
            edges = shape_of(node)[0]
            small = width <= NARROW or isinstance(edges, int) and edges * width <= FEW
            if work[node] >= WORTH and (wide or several and small):
                self.stored[node] = None

    def _move_views(self) -> None:
        """Have views split or merge features of nodes rather than those of edges, which a region
        cannot compute then: before gathers, and after sums at nodes."""
        for node in list(self.graph.nodes):
            if node in self._of_edges_alone:
                continue
            gathered = gather_of(first(node)) if node.target in VIEWS else None
            reduction = reduction_of(node)
            with self.graph.inserting_before(node):
                if gathered is not None and is_float(node) and _splits(node):
                    source, index = gathered
                    rows = self._with_features(source, shape_of(node)[1:], node)
                    args, value = (rows, 0, index), node.meta["val"]
                    new = self._call(aten.index_select.default, args, value, node)
                elif (
                    reduction is not None
                    and reduction.base is None
                    and reduction.reduce == "sum"
                    and reduction.values.target in VIEWS
                    and _splits(reduction.values)
                ):
                    values = first(reduction.values)
                    sizes = shape_of(node)[0], *shape_of(values)[1:]
                    fake = node.meta["val"].new_empty(sizes)
                    args = [self._size(s, node) for s in sizes], 0
                    zeros = self._call(aten.full.default, args, fake, node)
                    zeros.kwargs = {"dtype": fake.dtype, "device": fake.device}
                    args = zeros, 0, reduction.index, values
                    sums = self._call(aten.index_add.default, args, fake, node)
                    new = self._with_features(sums, shape_of(node)[1:], node)
                else:
                    continue
            node.replace_all_uses_with(new)
        self.graph.eliminate_dead_code()

    def _with_features(self, rows: fx.Node, features: tuple[Size, ...], like: fx.Node) -> fx.Node:
        """Rows with their features in other dimensions."""
        fake = rows.meta["val"].new_empty((shape_of(rows)[0], *features))
        return self._call(aten.reshape.default, (rows, [-1, *features]), fake, like)

    def _merge_sums(self) -> None:
        """Replace the sum of two reductions at the same index by one reduction."""
        for node in self.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            x, y, *_ = node.args
            if node.kwargs.get("alpha", 1) != 1 or x is y:
                continue
            if any(not isinstance(z, fx.Node) or len(z.users) > 1 for z in (x, y)):
                continue
            a, b = reduction_of(x), reduction_of(y)
            if a is None or b is None or a.base is not None or b.base is not None:
                continue
            if a.index is not b.index or not a.reduce == b.reduce == "sum":
                continue
            if not (
                same_shape(a.values, b.values) and same_shape(x, y) and dtype_of(x) == dtype_of(y)
            ):
                continue
            with self.graph.inserting_before(node):
                args = a.values, b.values
                total = self._call(aten.add.Tensor, args, a.values.meta["val"], node)
                last = max(node.args, key=list(self.graph.nodes).index)
                where = [z for z in last.args if isinstance(z, fx.Node)][0]
                args = where, 0, a.index, total
                merged = self._call(aten.index_add.default, args, node.meta["val"], node)
            node.replace_all_uses_with(merged)
            self.graph.eliminate_dead_code()

    def _take_factors_out(self, nodes: list[fx.Node]) -> None:
        """Hoist factors out of sums where that makes two sums equal, or one narrower."""
        groups: dict[tuple[fx.Node, str, str, Any], list[fx.Node]] = {}
        place = {node: n for n, node in enumerate(self.graph.nodes)}
        for node in nodes:
            values, at = self._summed(node)
            at = {rows: count for rows, count in at.items() if place[rows] < place[node]}
            for rows, count in at.items():
                parts = split(values, rows, count)
                if parts.terms and len(parts.factors) + len(parts.divisors):
                    key = rows, str(count), parts.key, wide(dtype_of(node))
                    groups.setdefault(key, []).append(node)
                    narrower = WIDER * _width(parts.shape) <= width_of(values)
                    if len(at) == 1 and narrower:
                        self._apart[node] = rows, count
        for (rows, *_), equal in groups.items():
            if len(equal) > 1:
                at = (rows, self._summed(equal[0])[1][rows])
                self._apart |= dict.fromkeys(equal, at)

    def _summed(self, node: fx.Node) -> tuple[Any, dict[fx.Node, Any]]:
        """The values that a node sums, and the indices it may sum at first, with node counts."""
        reduction = self.reductions.get(node)
        if reduction is not None and reduction.reduce == "sum":
            return reduction.values, {reduction.index: shape_of(node)[0]}
        over_edges = self._is_sum(node) and 0 in dims_of(node)
        return (node.args[0], self._counts) if over_edges else (None, {})

    # -- regions ----------------------------------------------------------------------------------

    def _at_nodes(self, node: fx.Node, reduction: Reduction) -> None:
        count = shape_of(node)[0]
        with self.graph.inserting_before(node):
            out = self._factored(node, reduction.values)
            if out is None:
                dtype = dtype_of(node)
                of = reduction.values, reduction.index, reduction.reduce
                wanted = dtype if reduction.base is None else wide(dtype)
                out = self._reduced(node, *of, count, shape_of(node), wanted)
            if out is None:
                return
            self._counts[reduction.index] = count
            if reduction.base is not None:
                args = (out, reduction.base)
                out = self._call(aten.add.Tensor, args, out.meta["val"], node)
            out = self._rounded(out, node)
        node.replace_all_uses_with(out)

    def _reduced(
        self,
        node: fx.Node,
        values: fx.Node,
        rows: fx.Node,
        reduce: str,
        count: Size,
        shape: tuple[Size, ...],
        dtype: Any,
    ) -> fx.Node | None:
        region = self._made(node, values, rows, reduce, dtype, count=count)
        return None if region is None else self._region(node, *region, shape, count)

    def _factored(self, node: fx.Node, values: fx.Node) -> fx.Node | None:
        """Sums at nodes, in the type of the computation, with the factors that are the same for all
        edges of a node hoisted; None if they are not hoisted."""
        if node not in self._apart:
            return None
        rows, count = self._apart[node]
        dtype = wide(dtype_of(node))

        def call(target: Any, args: Any, shape: tuple[Size, ...]) -> fx.Node:
            return self._call(target, args, node.meta["val"].new_empty(shape, dtype=dtype), node)

        parts = split(values, rows, count)
        key = rows, str(count), parts.key, dtype
        sums = self._sums.get(key)
        if sums is None:
            terms, shape = product(parts.terms, call), (count, *parts.shape[1:])
            sums = self._reduced(node, terms, rows, "sum", count, shape, dtype)
            if sums is None:
                return None
            self._sums[key] = sums
        out = scaled(sums, parts, call)
        return call(cleared, (out, rows), shape_of(out))

    def _replace_edges(self, node: fx.Node, given: bool = False) -> None:
        """Replace edge values by a region's, in the order of rows or the given one."""
        is_sum = node.target in SUMS
        values = first(node) if is_sum else node
        summed = len(dims_of(node)) if is_sum else 0
        vectors = self._vectors(values)
        if not vectors:
            return  # torch computes it
        rows = self._chosen(vectors)
        region = self._made(node, values, rows, None, dtype_of(node), summed)
        if region is None:
            self.stored.pop(node, None)
            return
        program, tensors, indices = region
        m = self._rows_of(rows, program, tensors)
        if m is None:
            return
        with self.graph.inserting_before(node):
            out = self._region(node, program, tensors, indices, shape_of(node), m, given)
        node.replace_all_uses_with(out)
        self.stored.pop(node, None)
        self.stored[out] = None if given else rows

    def _over_all_edges(self, node: fx.Node) -> None:
        """Sum over all edges: at nodes first, and then over nodes."""
        values = first(node)
        vectors = self._vectors(values)
        if not vectors or values.op == "placeholder":
            return
        with self.graph.inserting_before(node):
            out = self._factored(node, values)
            if out is None:
                rows = self._chosen(vectors)
                region = self._made(node, values, rows, "sum", wide(dtype_of(node)))
                m = None if region is None else self._rows_of(rows, *region[:2])
                if region is None or m is None:
                    return
                out = self._region(node, *region, (m, *shape_of(values)[1:]), m)
            value = node.meta["val"].to(dtype_of(out))
            total = self._call(node.target, (out, *node.args[1:]), value, node)
            total.kwargs = {name: x for name, x in node.kwargs.items() if name != "dtype"}
            total = self._rounded(total, node)
        node.replace_all_uses_with(total)

    def _gradient_of_product(self, node: fx.Node) -> None:
        """Replace a product with edge values that are computed for it alone: the gradient of a
        matrix that each edge is multiplied by, or that of the edges' numbers."""
        args: Any = node.args
        x, y = args
        left = untransposed(x)
        if left is None:
            self._product_with(node, x, y, over_edges=False)
        elif not self._product_with(node, y, left, over_edges=True):
            self._product_with(node, left, y, over_edges=True, flipped=True)

    def _product_with(
        self,
        node: fx.Node,
        matrix: fx.Node,
        other: fx.Node,
        over_edges: bool,
        flipped: bool = False,
    ) -> bool:
        """Replace a product of edge values and another matrix by a region; return whether it is
        one."""
        values, columns = unviewed(matrix), shape_of(other)[-1]
        if not is_float(node) or not is_float(other) or not self._is_pointwise(values):
            return False
        known = isinstance(columns, int) and columns <= SMALL and columns < width_of(values)
        sizes = shape_of(values)[1:]
        whole = all(isinstance(s, int) for s in sizes) and len(shape_of(matrix)) == 2
        if not known or not whole or width_of(matrix) != width_of(values):
            return False
        if not same(shape_of(matrix)[0], shape_of(values)[0]):
            return False
        vectors = self._vectors(values)
        if not vectors or values in self.stored or over_edges and self._index_vector(other) is None:
            return False
        rows = self._chosen(vectors)
        with self.graph.inserting_before(node):
            made = self._made(node, values, rows, None, wide(dtype_of(node)), sorted_all=True)
            m = None if made is None else self._rows_of(rows, *made[:2])
            if made is None or m is None:
                return False
            program, tensors, indices = made
            if over_edges:
                other = self._sorted(other, rows)
            shape = [self._size(s, node) for s in shape_of(values)]
            args = (
                number_of(program), tensors, indices, other, shape, self._size(m, node),
                over_edges, False,
            )  # fmt: skip
            result = shape_of(node)[::-1] if flipped else shape_of(node)
            fake = node.meta["val"].new_empty(result, dtype=getattr(torch, program.stored))
            out = self._call(region_product, args, fake, node)
            self._note(out, node, program, result)
            if not over_edges:
                self.stored[out] = rows
            total = self._rounded(out, node)
            if flipped:
                fake = total.meta["val"].t()
                total = self._call(aten.permute.default, (total, [1, 0]), fake, node)
        node.replace_all_uses_with(total)
        return True

    def _sorted(self, values: fx.Node, rows: fx.Node) -> fx.Node:
        """Edge values in the order of rows, sorted once for all their readers."""
        by = self.stored.get(values)
        if by is rows:
            return values
        known = self._in_order.get((values, rows))
        if known is None:
            place = {node: n for n, node in enumerate(self.graph.nodes)}
            read: list[fx.Node] = [x for x in (values, rows, by) if x is not None]
            last = max(read, key=place.__getitem__)
            with self.graph.inserting_after(last):
                args = (values, rows, by)
                known = self._call(in_order, args, values.meta["val"], values)
            self._in_order[values, rows] = known
        return known

    def _rounded(self, out: fx.Node, node: fx.Node) -> fx.Node:
        """Cast a node's replacement to the node's type."""
        dtype = dtype_of(node)
        if dtype_of(out) == dtype:
            return out
        result = self._call(aten._to_copy.default, (out,), out.meta["val"].to(dtype), node)
        result.kwargs = {"dtype": dtype}
        return result

    def _vectors(self, values: fx.Node) -> list[fx.Node]:
        """The indices by which an expression gathers, or else those that sort what it reads."""
        expression = Expression(None, self.stored)
        try:
            expression.of(values, axes_of(values), root=True)
        except Stored:
            return []
        return expression.others or [x for x in expression.orders if x is not None]

    def _restore_order(self) -> None:
        """Return edge values to the caller's order for readers other than regions."""
        for node, rows in self.stored.items():
            others = [u for u in node.users if u.target not in SORTED]
            if rows is None or not others:
                continue
            if len(others) == len(node.users):
                node.args = (*node.args[:-1], True)
                continue
            with self.graph.inserting_before(node.next):
                back = self._call(restored, (node, rows), node.meta["val"], node)
            for user in others:
                user.replace_input_with(node, back)

    def _chosen(self, vectors: list[fx.Node]) -> fx.Node:
        """The index to sort edges by: one that is reduced at, if any, else the first."""
        return next((v for v in self.rows if v in vectors), vectors[0])

    def _rows_of(self, rows: fx.Node, program: Program, tensors: list[fx.Node]) -> Size | None:
        """The number of nodes of the index of rows; None if it is unknown."""
        for tensor, operand in zip(tensors, program.operands, strict=True):
            if operand.at == "row":
                self._counts[rows] = shape_of(tensor)[0]
        return self._counts.get(rows)

    def _made(
        self, node: fx.Node, values: fx.Node, rows: fx.Node, reduce: str | None,
        dtype: Any, summed: int = 0, count: Size | None = None, sorted_all: bool = False,
    ) -> tuple[Program, list[fx.Node], list[fx.Node]] | None:  # fmt: skip
        """The program of a region, the tensors it reads, and its indices; None if it cannot be one.

        dtype : type of its result
        count : number of the nodes of `rows`, if known
        sorted_all : whether edge values must be in the order of rows
        """
        expression, axes = Expression(rows, self.stored, count, wide(dtype)), axes_of(values)
        try:
            text = expression.of(values, axes, root=values is node)
        except Stored as why:
            self._why[node.name] = f"reads {why.args[0]}, of {dtype_of(why.args[0])}"
            return None
        final = expression.finished(text)
        if node in final.tensors:
            return None  # an unknown operator
        sizes = [s for s, a in zip(shape_of(values)[1:], axes, strict=True) if a is not None]
        loops = len(sizes)
        read = {a for operand in final.operands for a in operand.axes}
        kept, lost = kept_axes(axes, summed, 0 if reduce else len(shape_of(node)))
        if any(a not in read for a in range(loops - lost, loops)):
            return None
        last = sizes[-1] if sizes else 1
        short = isinstance(last, int) and last < SHORT
        whole = isinstance(last, int) and (last < LANES or last % LANES == 0)
        known = tuple(s if whole and isinstance(s, int) else None for s in sizes)
        operands = list(final.operands)
        unsorted = [
            n
            for n, x in enumerate(operands)
            if x.at == "edge" and x.number and (sorted_all or any(a and a < 0 for a in x.axes))
        ]
        for n in unsorted:
            operands[n] = replace(operands[n], number=0)
        program = Program(
            final.text, tuple(operands), tuple(kept), known, final.others, reduce, lost, short,
            final.dtype, DTYPES[dtype],
        )  # fmt: skip
        refusal = program.refusal()
        if refusal:
            self._why[node.name] = refusal
            return None
        for n in unsorted:
            final.tensors[n] = self._sorted(final.tensors[n], rows)
        return program, final.tensors, final.indices

    def _region(
        self, node: fx.Node, program: Program, tensors: list[fx.Node], indices: list[fx.Node],
        shape: tuple[Size, ...], m: Size, given: bool = False,
    ) -> fx.Node:  # fmt: skip
        value = node.meta["val"].new_empty(shape, dtype=getattr(torch, program.stored))
        sizes = [self._size(s, node) for s in shape]
        args = (number_of(program), tensors, indices, sizes, self._size(m, node), given)
        call = self._call(region, args, value, node)
        self._note(call, node, program, shape)
        return call

    def _note(
        self, call: fx.Node, node: fx.Node, program: Program, shape: tuple[Size, ...]
    ) -> None:
        """Record a region."""
        text = ", ".join(map(str, shape))
        self.found.append(Found(node.name, program, f"({text})", module_of(node)[0]))
        call.meta[FOUND] = self.found[-1]

    def _call(self, target: Any, args: Any, value: Any, like: fx.Node) -> fx.Node:
        """Insert a node into the part of the graph, forward or backward, of the node `like`."""
        new = self.graph.call_function(target, args)
        new.meta = {k: v for k, v in like.meta.items() if k in KEPT_META}
        new.meta["val"] = value
        return new

    def _size(self, size: Size, at: fx.Node) -> fx.Node | int:
        """A size as an argument: a number, or a node before `at` that has it."""
        if isinstance(size, int):
            return size
        before = []
        for node in self.graph.nodes:
            if node is at:
                break
            before.append(node)
        for node in before:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and str(value) == str(size):
                return node
        for node in before:
            for dim, other in enumerate(shape_of(node)):
                if str(other) == str(size):
                    return self._call(aten.sym_size.int, (node, dim), size, at)
        raise RuntimeError(f"no node of the graph has the size {size}")


def _splits(view: fx.Node) -> bool:
    """Whether a view of edge values, or of nodes', splits or merges their features, of known
    number."""
    before, after = shape_of(first(view)), shape_of(view)
    known = all(isinstance(s, int) for s in (*before[1:], *after[1:]))
    return (
        known
        and len(before) > 1
        and len(after) > 1
        and same(before[0], after[0])
        and 0 < width_of(view) == width_of(first(view))
        and axes_before(view, axes_of(view)) is None
    )


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read a node, through views."""
    for user in node.users:
        if user.op == "call_function" and user.target in VIEWS | SAME:
            yield from _readers(user)
        else:
            yield user
