"""The operators that run regions of a model's graph: `torch.ops.sparsetir.region` and others."""

from __future__ import annotations

import hashlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx

from sparsetir.graph.calls import Call, may_be_recorded, recorded_kernel
from sparsetir.graph.orders import Order, arranged, check, order_of, places_between, range_of
from sparsetir.graph.products import Run
from sparsetir.graph.programs import GIVEN, Program
from sparsetir.ops.cache import is_private
from sparsetir.ops.registry import LIBRARY
from sparsetir.ops.tensors import plain_tensor
from sparsetir.reductions import EXTREMA
from sparsetir.runtime.kernel import Kernel

# Programs by number, as torch's operators take no objects; equal programs share a number.
PROGRAMS: dict[int, Program] = {}
# Regions of single calls, by negative numbers.
_calls: WeakValueDictionary[int, Region | RegionProduct] = WeakValueDictionary()
CHUNK = 1 << 20  # bytes of edge values that a product with them computes at a time
_next = itertools.count(-1, -1)
# Calls on the same edges after which exact values replace estimates for their kernels, and number
# of edges from which they do at once: for fewer, computing them takes as long as several calls.
CALLS, MANY = 16, 1 << 16


@cache
def number_of(program: Program) -> int:
    """The number by which the operator looks up a program: the same in all processes, as torch
    keeps graphs with such numbers."""
    number = int.from_bytes(hashlib.sha256(repr(program).encode()).digest()[:7], "big")
    PROGRAMS[number] = program
    return number


def called(node: fx.Node, calls: list[Call] | None = None) -> Region | RegionProduct:
    """Make the object that runs a node of :data:`RUNNERS`; calls : see :class:`Region`."""
    number: Any = node.args[0]
    return RUNNERS[node.target](PROGRAMS[number], calls)


def numbered(new: Region | RegionProduct) -> int:
    """Number a result of :func:`called`; operators look it up by that while it lives."""
    number = next(_next)
    _calls[number] = new
    return number


@dataclass(slots=True)
class _Bound:
    """A kernel with all of its arguments in order; :class:`_Of` stands for arrays of a call.

    left : calls until estimates among the arguments are replaced; negative if there are none
    numbers : the arguments that affect speed alone, by name
    """

    kernel: Kernel
    arguments: list[Any]
    left: int
    numbers: dict[str, int]


class _Kernel:
    """A kernel of a program, with the origin of each of its arguments.

    gathered : numbers of each operand that is read by another index, and of that index
    origins : for each argument an array of the call, a dimension of one, or the name of an array or
        size that depends on indices
    """

    def __init__(self, program: Program, kernel: Kernel) -> None:
        self.kernel = kernel
        origins: dict[str, _Of | tuple[int, int]] = {}
        count = len(program.operands)
        for n, x in enumerate(program.operands):
            origins[f"x{n}"], first = _Of(n), int(x.at != "all")
            loops = ((a, k) for k, a in enumerate(x.axes, first) if a is not None and a >= 0)
            origins |= {f"d{a}": (n, k) for a, k in loops}
            if x.at == "other":
                origins[f"n{x.number}"] = n, 0
        origins |= {f"d{a}": (count, 1 + k) for k, a in enumerate(program.result) if a is not None}
        origins["out"] = _Of(count)
        self.gathered = [(n, x.number) for n, x in enumerate(program.operands) if x.at == "other"]
        self.origins = [origins.get(name, name) for name in kernel.signature.passed]


class _Prepared(NamedTuple):
    """A kernel's arguments that depend on indices.

    kernel : the default kernel
    arrays : its arrays and sizes that depend on indices, by name
    ranges : least and greatest node of the other indices
    moved : by number, the permutation of operands that are sorted by rows before the kernel runs
    passed : the kernel with its arguments, by the shapes of operands
    aligned : for each operand whether its edges are in the order of the rows
    places : original positions of the result's edges; None for the same order
    alone : nodes without edges, for extrema
    pieces : by number of edges, pieces of that many neighbouring edges
    """

    kernel: _Kernel
    arrays: dict[str, Any]
    ranges: list[tuple[int, int]]
    moved: dict[int, Tensor]
    passed: dict[Any, _Bound]
    aligned: tuple[bool, ...]
    places: Tensor | None
    alone: Tensor | None
    pieces: dict[int, list[_Piece]]


@dataclass(slots=True)  # whose arrays, views of the whole's, the cache does not measure
class _Piece:
    """Neighbouring edges, in the order of the rows.

    rows : the rows they are in
    first : the number of the first edge
    prepared : the kernel's arguments for these edges
    """

    rows: slice
    first: int
    prepared: _Prepared


def _pieces(prepared: _Prepared, edges: int, count: int) -> list[_Piece]:
    """Pieces of `count` edges; the last one may have fewer."""
    starts, pieces = prepared.arrays["indptr"], []
    for first in range(0, edges, count):
        last = min(first + count, edges)
        ends = torch.tensor([first, last - 1], dtype=starts.dtype)
        top, bottom = (int(n) for n in torch.searchsorted(starts, ends, right=True))
        pointers = starts[top - 1 : bottom + 1].clamp(first, last) - first
        arrays = {
            name: x[first:last] if isinstance(x, Tensor) else x
            for name, x in prepared.arrays.items()
        }
        arrays |= {"indptr": pointers, "m": len(pointers) - 1, "edges": last - first}
        piece = prepared._replace(arrays=arrays, passed={}, pieces={})
        pieces.append(_Piece(slice(top - 1, bottom), first, piece))
    return pieces


def _prepare(
    program: Program, kernels: dict[Any, _Kernel], order: Order, indices: list[Tensor], m: int
) -> _Prepared:
    rows, others = indices[0], indices[1 : 1 + program.others]
    check((0, order.high), m)
    arrays: dict[str, Any] = {"indptr": order.starts(m), "m": m, "edges": len(rows)}
    ranges = []
    for n, index in enumerate(others):
        along = order.in_this_order(index) or (arranged(index, rows), range_of(index))
        arrays[f"index{n}"] = along[0]
        ranges.append(along[1])
    aligned, moved = [], {}
    for n, operand in enumerate(program.operands):
        places = None
        if operand.at == "edge" and operand.number:
            of = None if operand.number == GIVEN else indices[operand.number]
            places = places_between(of, rows)
        few = program.sorts_first(operand)
        aligned.append(places is None or few)
        if places is not None and few:
            moved[n] = places
        elif places is not None:
            arrays[f"place{n}"] = places
    kernel = kernels.get(key := tuple(aligned))
    if kernel is None:
        kernel = kernels[key] = _Kernel(program, program.kernel(key))
    extremum = program.reduce in EXTREMA
    alone = order.without_edges(m) if extremum else None
    return _Prepared(kernel, arrays, ranges, moved, {}, key, order.places, alone, {})


class _Shared:
    """State that regions of one program share, as layers of a model read the same edges in turn.

    kernels : by :attr:`_Prepared.aligned`
    last : for the last call, its indices with their versions, the number of nodes, and arguments
    key : stands for this object where it must not be kept alive
    """

    def __init__(self) -> None:
        self.key = object()
        self.kernels: dict[Any, _Kernel] = {}
        self.last: tuple[Any, int, _Prepared] | None = None


# By the number of the program, while one of its regions lives.
_shared: WeakValueDictionary[int, _Shared] = WeakValueDictionary()


class Region:
    """A region, with the arguments prepared for the indices of its last call.

    calls : the list to record calls in, if shapes or indices are new
    copies : whether the last call copied its result back to the original order of edges
    """

    def __init__(self, program: Program, calls: list[Call] | None = None) -> None:
        self.program, self.calls, self.copies = program, calls, False
        self._dtypes = [getattr(torch, x.dtype) for x in program.operands]
        self._stored = getattr(torch, program.stored)
        # Regions that record their calls share nothing.
        new = _Shared()
        self._shared = _shared.setdefault(number_of(program), new) if calls is None else new
        self.__name__ = "region"  # torch's graphs need it

    def _prepared(self, indices: list[Tensor], m: int) -> _Prepared:
        shared = self._shared
        if shared.last is not None:
            last, size, prepared = shared.last
            if size == m and all(
                ref() is x and version == x._version
                for (ref, version), x in zip(last, indices, strict=True)
            ):
                return prepared
        others = indices[1 : 1 + self.program.others]
        order = order_of(indices[0], m, others[0] if others else None)

        def make() -> _Prepared:
            return _prepare(self.program, shared.kernels, order, indices, m)

        shared.last = None
        if not all(map(is_private, indices)):
            return make()
        prepared = order.prepared((shared.key, m), indices, make)
        shared.last = [(weakref.ref(x), x._version) for x in indices], m, prepared
        return prepared

    def __call__(
        self, operands: list[Tensor], indices: list[Tensor], shape: list[int], m: int, given: bool
    ) -> Tensor:
        """Run the region; return a result of this shape.

        m : number of the nodes that edges are reduced at, or sorted by
        given : whether to return edge values in the original order of edges
        """
        out = torch.empty(shape, dtype=self._stored)
        if not len(indices[0]) or not out.numel():
            return out.zero_()
        prepared = self._prepared(indices, m)
        key = tuple(shape), *(x.shape for x in operands)
        arrays = [self._plain(prepared, n, x, indices) for n, x in enumerate(operands)]
        arrays.append(out)
        _run_kernel(self._bound(prepared, key, arrays), arrays)
        if prepared.alone is not None:
            out.index_fill_(0, prepared.alone, 0.0)
        places = prepared.places if given and self.program.reduce is None else None
        self.copies = places is not None
        if places is not None:
            out = torch.empty_like(out).index_copy_(0, places, out)
        return out

    def _plain(self, prepared: _Prepared, n: int, x: Tensor, indices: list[Tensor]) -> Tensor:
        """Convert an operand for the kernel."""
        if x.dtype is not self._dtypes[n]:
            x = x.to(self._dtypes[n])
        if n in prepared.moved:
            if self.program.operands[n].number == GIVEN and is_private(x):
                x = arranged(x, indices[0])
            else:
                # Indexing takes half the time in one dimension.
                one = x.reshape(-1) if x.numel() == len(x) else x
                x = one.index_select(0, prepared.moved[n]).view(x.shape)
        if x.requires_grad:
            x = x.detach()
        if not x.dim():
            x = x.reshape(1)
        if not x.is_contiguous() or x.is_neg() or x._is_zerotensor():
            return plain_tensor(x)
        return x

    def chunks(
        self, operands: list[Tensor], indices: list[Tensor], shape: list[int], m: int
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the result in pieces of neighbouring edges in the order of the rows: the first
        edge, the one after the last, and their values, in memory that the next piece overwrites.

        All operands of edges must be in the order of the rows.
        """
        prepared = self._prepared(indices, m)
        arrays = [self._plain(prepared, n, x, indices) for n, x in enumerate(operands)]
        edges, *sizes = shape
        count = max(1, CHUNK // (math.prod(sizes) * self._stored.itemsize))
        out = torch.empty((min(count, edges), *sizes), dtype=self._stored)
        if count not in prepared.pieces:
            prepared.pieces[count] = _pieces(prepared, edges, count)
        key, bound = (tuple(shape), *(x.shape for x in operands)), None
        for piece in prepared.pieces[count]:
            first = piece.first
            last = first + piece.prepared.arrays["edges"]
            within = {"row": piece.rows, "edge": slice(first, last)}
            passed = [
                x[within[operand.at]] if operand.at in within else x
                for x, operand in zip(arrays, self.program.operands, strict=True)
            ]
            passed.append(out[: last - first])
            bound = self._bound(piece.prepared, key, passed, edges >= MANY, bound)
            _run_kernel(bound, passed)
            yield first, last, passed[-1]

    def _bound(
        self, prepared: _Prepared, key: Any, arrays: list[Tensor], exact: bool = False,
        before: _Bound | None = None,
    ) -> _Bound:  # fmt: skip
        """The kernel with its arguments.

        key : the shapes of the call
        before : the kernel with its arguments for the piece before, if it is not the first
        """
        known = prepared.passed.get(key)
        if known is None or not known.left:
            exact = exact or known is not None
            known = prepared.passed[key] = self._passed(prepared, arrays, exact, before)
        known.left -= 1
        return known

    def _passed(
        self, prepared: _Prepared, arrays: list[Tensor], exact: bool, before: _Bound | None
    ) -> _Bound:
        """The recorded or default kernel, and all of its arguments in order.

        arrays : the converted operands, and the result
        exact : whether to compute exactly, even for few edges, values that affect speed alone
        before : of the piece before, whose call is recorded, and whose numbers serve this one
        """
        program, compiled = self.program, prepared.kernel
        for n, number in compiled.gathered:
            check(prepared.ranges[number], len(arrays[n]))
        if self.calls is not None or may_be_recorded():
            compiled = self._recorded(prepared, arrays, before is None)
        kernel, named = compiled.kernel, prepared.arrays
        exact = exact or prepared.arrays["edges"] >= MANY
        if kernel.computed:
            sizes = program.sizes([x.shape for x in arrays[:-1]], arrays[-1].shape)
            named = {**named, **sizes}
            like = before is not None and before.kernel is kernel and before.numbers
            named |= kernel.compute_passed(named, like or not exact)
        origins: list[Any] = compiled.origins
        arguments = [
            origin if type(origin) is _Of
            else named[origin] if isinstance(origin, str)
            else arrays[origin[0]].shape[origin[1]]
            for origin in origins
        ]  # fmt: skip
        left = CALLS if kernel.estimates and not exact else -1
        return _Bound(kernel, arguments, left, {name: named[name] for name in kernel.estimates})

    def _recorded(self, prepared: _Prepared, arrays: list[Tensor], noted: bool) -> _Kernel:
        """The kernel that tuning recorded for a call, or else the default one."""
        names = [*(f"x{n}" for n in range(len(arrays) - 1)), "out"]
        shapes = {name: tuple(x.shape) for name, x in zip(names, arrays, strict=True)}
        sizes = self.program.sizes([x.shape for x in arrays[:-1]], arrays[-1].shape)
        known, kernel = {**prepared.arrays, **sizes}, prepared.kernel.kernel
        call = Call(self.program, prepared.aligned, kernel.signature.names, known, shapes)
        if self.calls is not None and noted:
            self.calls.append(call)
        recorded = recorded_kernel(call)
        return prepared.kernel if recorded is None else _Kernel(self.program, recorded)


class _Of(NamedTuple):
    """A placeholder for an array of a call, by its number."""

    of: int


def _run_kernel(known: _Bound, arrays: list[Tensor]) -> None:
    known.kernel.run_unchecked([arrays[x.of] if type(x) is _Of else x for x in known.arguments])


class RegionProduct:
    """A product with the edge values of a region, which are computed in chunks.

    calls, copies : see :class:`Region`
    """

    def __init__(self, program: Program, calls: list[Call] | None = None) -> None:
        self.program, self.copies = program, False
        self._region, self._product = Region(program, calls), Run(gradient=True)
        self._stored = getattr(torch, program.stored)
        self.__name__ = "region_product"

    def __call__(
        self, operands: list[Tensor], indices: list[Tensor], other: Tensor, shape: list[int],
        m: int, over_edges: bool, given: bool,
    ) -> Tensor:  # fmt: skip
        """Compute the product of the edge values, as a matrix, and another matrix.

        shape : shape of the edge values
        m : number of the nodes that edges are sorted by
        over_edges : whether to compute `other.T @ values`, with edges in the order of the rows,
            rather than `values @ other`, which has a row per edge
        given : whether to return rows in the original order of edges
        """
        other, width = other.detach().to(self._stored), math.prod(shape[1:])
        chunks = self._region.chunks(operands, indices, shape, m) if shape[0] and width else ()
        if over_edges:
            total = torch.zeros((other.shape[1], width), dtype=self._stored)
            for first, last, values in chunks:
                values, part = values.flatten(1), other[first:last]
                if self._stored == torch.float32:
                    total = self._product(part, values, total, into=True)
                else:
                    total.addmm_(part.t(), values)
            return total
        out = torch.zeros((shape[0], other.shape[1]), dtype=self._stored)
        for first, last, values in chunks:
            torch.mm(values.flatten(1), other, out=out[first:last])
        places = order_of(indices[0]).places if given else None
        self.copies = places is not None
        return out if places is None else torch.empty_like(out).index_copy_(0, places, out)


def _runner_of(program: int, kind: Any) -> Any:
    return _calls[program] if program < 0 else kind(PROGRAMS[program])


def _fake(program: int, operands: list[Tensor], indices: list[Tensor], shape: Any, *_: Any) -> Any:
    stored = getattr(torch, _runner_of(program, Region).program.stored)
    return (operands or indices)[0].new_empty(shape, dtype=stored)


def _product_fake(
    program: int, operands: list[Tensor], indices: list[Tensor], other: Tensor, shape: Any,
    m: Any, over_edges: bool, given: bool,
) -> Any:  # fmt: skip
    stored = getattr(torch, _runner_of(program, RegionProduct).program.stored)
    columns = other.shape[1]
    result = (columns, math.prod(shape[1:])) if over_edges else (shape[0], columns)
    return other.new_empty(result, dtype=stored)


def sort(values: Tensor, rows: Tensor, by: Tensor | None) -> Tensor:
    """Sort edge values by `rows`; the result must not be written to.

    by : the index that they are sorted by, None for the original order
    """
    return (
        arranged(values, rows) if by is None and is_private(values) else _in_order(values, rows, by)
    )


def _in_order(values: Tensor, rows: Tensor, by: Tensor | None) -> Tensor:
    places = places_between(by, rows)
    return values.clone() if places is None else values.index_select(0, places)


def _restored(values: Tensor, rows: Tensor) -> Tensor:
    places = order_of(rows).places
    if places is None:
        return values.clone()
    return torch.empty_like(values).index_copy_(0, places, values)


def clear(values: Tensor, rows: Tensor) -> Tensor:
    """Set values to 0 at nodes that no edge ends at, in place."""
    if not len(rows):
        return values.zero_()
    return values.index_fill_(0, order_of(rows).without_edges(len(values)), 0.0)


def _operator(schema: str, run: Callable[..., Tensor], fake: Any) -> Callable[..., Tensor]:
    """Register a torch operator by its schema."""
    name = LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sparsetir::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.sparsetir, name).default


def _like(x: Tensor, _: Tensor) -> Tensor:
    return torch.empty_like(x)


region = _operator(
    "region(int program, Tensor[] operands, Tensor[] indices, SymInt[] shape, SymInt m, bool given)"
    " -> Tensor",
    lambda program, *args: _runner_of(program, Region)(*args),
    _fake,
)
# See :class:`RegionProduct`.
region_product = _operator(
    "region_product(int program, Tensor[] operands, Tensor[] indices, Tensor other, SymInt[] shape,"
    " SymInt m, bool over_edges, bool given) -> Tensor",
    lambda program, *args: _runner_of(program, RegionProduct)(*args),
    _product_fake,
)
RUNNERS: dict[Any, type[Region] | type[RegionProduct]] = {
    region: Region, region_product: RegionProduct,
}  # fmt: skip
# Edge values, in the given order or sorted by another index, sorted by an index.
in_order = _operator(
    "in_order(Tensor values, Tensor rows, Tensor? by) -> Tensor",
    _in_order,
    lambda values, *_: torch.empty_like(values),
)
# Edge values sorted by an index, returned to the original order of edges.
restored = _operator("restored(Tensor values, Tensor rows) -> Tensor", _restored, _like)
# Values of nodes, set to 0 at nodes that no edge ends at.
cleared = _operator(
    "cleared(Tensor values, Tensor rows) -> Tensor", lambda x, rows: clear(x.clone(), rows), _like
)
INDEXED = {*RUNNERS, in_order, restored, cleared}  # operators that take indices of edges
