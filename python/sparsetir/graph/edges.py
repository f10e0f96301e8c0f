"""Hand-written stage-III kernels that sort edges for regions, for models that run without torch.

Nodes of edges are in int64, positions of edges in int32. `orders.py` is the same for torch.
"""

from tvm import tirx
from tvm.script import tirx as T


@T.prim_func(s_tir=True)
def count_edges(index: T.handle, starts: T.handle):
    """The starts of each node's edges, once they are sorted."""
    T.func_attr({"tirx.noalias": True})
    edges, ends = T.int64(), T.int64()
    AT = T.match_buffer(index, (edges,), "int64")
    START = T.match_buffer(starts, (ends,), "int32")
    for i in range(ends):
        START[i] = 0
    for e in range(edges):
        assert AT[e] >= 0 and AT[e] < ends - 1, ("ValueError", ["a node of edges is out of range"])
        START[AT[e] + 1] = START[AT[e] + 1] + 1
    for i in range(ends - 1):
        START[i + 1] = START[i + 1] + START[i]


@T.prim_func(s_tir=True)
def sort_edges(index: T.handle, starts: T.handle, places: T.handle):
    """The original positions of the edges, sorted by node."""
    T.func_attr({"tirx.noalias": True})
    edges, ends = T.int64(), T.int64()
    AT = T.match_buffer(index, (edges,), "int64")
    START = T.match_buffer(starts, (ends,), "int32")
    PLACE = T.match_buffer(places, (edges,), "int32")
    for e in range(edges):
        PLACE[START[AT[e]]] = T.Cast("int32", e)
        START[AT[e]] = START[AT[e]] + 1
    for i in range(ends - 1):  # each start has become the next one
        START[ends - 1 - i] = START[ends - 2 - i]
    START[0] = 0


@T.prim_func(s_tir=True)
def places_between(by: T.handle, places: T.handle, inverse: T.handle, out: T.handle):
    """The positions, in the order `by`, of edges in the order `places`."""
    T.func_attr({"tirx.noalias": True})
    edges = T.int64()
    BY = T.match_buffer(by, (edges,), "int32")
    PLACE = T.match_buffer(places, (edges,), "int32")
    INVERSE = T.match_buffer(inverse, (edges,), "int32")
    OUT = T.match_buffer(out, (edges,), "int32")
    for e in range(edges):
        INVERSE[BY[e]] = T.Cast("int32", e)
    for e in range(edges):
        OUT[e] = INVERSE[PLACE[e]]


@T.prim_func(s_tir=True)
def restored(values: T.handle, places: T.handle, out: T.handle):
    """Values of sorted edges in the original order."""
    T.func_attr({"tirx.noalias": True})
    edges, width = T.int64(), T.int64()
    IN = T.match_buffer(values, (edges, width), "float32")
    PLACE = T.match_buffer(places, (edges,), "int32")
    OUT = T.match_buffer(out, (edges, width), "float32")
    for e, k in T.grid(edges, width):
        OUT[PLACE[e], k] = IN[e, k]


@T.prim_func(s_tir=True)
def zero_of_empty_rows(values: T.handle, starts: T.handle, out: T.handle):
    """Values of nodes, with 0 at nodes without incoming edges."""
    T.func_attr({"tirx.noalias": True})
    nodes, width, ends = T.int64(), T.int64(), T.int64()
    IN = T.match_buffer(values, (nodes, width), "float32")
    START = T.match_buffer(starts, (ends,), "int32")
    OUT = T.match_buffer(out, (nodes, width), "float32")
    for i, k in T.grid(nodes, width):
        OUT[i, k] = T.Select(START[i + 1] > START[i], IN[i, k], T.float32(0))


@T.prim_func(s_tir=True)
def in_range(index: T.handle, size: T.int64, out: T.handle):
    """A copy of nodes that asserts that all are less than a size."""
    T.func_attr({"tirx.noalias": True})
    edges = T.int64()
    AT = T.match_buffer(index, (edges,), "int64")
    OUT = T.match_buffer(out, (edges,), "int64")
    for e in range(edges):
        assert AT[e] >= 0 and AT[e] < size, ("ValueError", ["a node of edges is out of range"])
        OUT[e] = AT[e]


@T.prim_func(s_tir=True)
def count_kept(mask: T.handle, count: T.handle):
    """The number of edges that a mask selects."""
    T.func_attr({"tirx.noalias": True})
    edges = T.int64()
    MASK = T.match_buffer(mask, (edges,), "int32")
    COUNT = T.match_buffer(count, (1,), "int64")
    COUNT[0] = T.int64(0)
    for e in range(edges):
        COUNT[0] = COUNT[0] + T.Cast("int64", MASK[e])


@T.prim_func(s_tir=True)
def put(base: T.handle, index: T.handle, values: T.handle, out: T.handle):
    """Numbers of nodes, with some of them replaced."""
    T.func_attr({"tirx.noalias": True})
    nodes, count = T.int64(), T.int64()
    BASE = T.match_buffer(base, (nodes,), "float32")
    AT = T.match_buffer(index, (count,), "int64")
    IN = T.match_buffer(values, (count,), "float32")
    OUT = T.match_buffer(out, (nodes,), "float32")
    for i in range(nodes):
        OUT[i] = BASE[i]
    for n in range(count):
        assert AT[n] >= 0 and AT[n] < nodes, ("ValueError", ["a node of edges is out of range"])
        OUT[AT[n]] = IN[n]


def _kept(dtype: str) -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def kept(values: T.handle, mask: T.handle, out: T.handle):
        """The part of an array at the edges that a mask selects, along its second dimension."""
        T.func_attr({"tirx.noalias": True})
        rows, edges, left, width = T.int64(), T.int64(), T.int64(), T.int64()
        IN = T.match_buffer(values, (rows, edges, width), dtype)
        MASK = T.match_buffer(mask, (edges,), "int32")
        OUT = T.match_buffer(out, (rows, left, width), dtype)
        at = T.alloc_buffer((1,), "int64")
        for i in range(rows):
            at[0] = T.int64(0)
            for e in range(edges):
                if MASK[e] != 0:
                    for k in range(width):
                        OUT[i, at[0], k] = IN[i, e, k]
                    at[0] = at[0] + T.int64(1)

    return kept.with_attr("global_symbol", f"kept_{dtype}")


KEPT = {dtype: _kept(dtype) for dtype in ("int64", "float32")}
