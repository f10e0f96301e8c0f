"""Cached sorting of edges by one of their indices."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from sparsetir.ops.cache import cacheable, is_private, kept, memory_key
from sparsetir.ops.compress import sorted_pairs
from sparsetir.sparse_ir.errors import StructureIndexError

INT32_MAX = 2**31 - 1
T = TypeVar("T")


def check(nodes: tuple[int, int], size: int, edges: int = 0) -> None:
    """Raise StructureIndexError unless the least and greatest of `nodes` are in range of `size`."""
    low, high = nodes
    if low < 0 or high >= size or max(size, edges) > INT32_MAX:
        raise StructureIndexError(
            "sparsetir, as backend of torch.compile: an index of edges: expected each node to be "
            f"at least 0 and less than {size}, got {low if low < 0 else high}"
        )


def range_of(index: Tensor) -> tuple[int, int]:
    """The least and the greatest node of an index."""

    def make() -> tuple[int, int]:
        low, high = (int(x) for x in torch.aminmax(index)) if len(index) else (0, -1)
        return low, high

    return _kept("range", make, index)


class Order:
    """A stable order of edges by their nodes, which are less than `size`.

    other : another index, which is sorted in the same pass
    places : (edges,) int64 original position of each edge in this order; None for the same order
    """

    places: Tensor | None

    def __init__(self, index: Tensor, size: int, other: Tensor | None) -> None:
        self.edges, most = len(index), INT32_MAX - 1
        self._starts: dict[int, Tensor] = {}
        self._alone: dict[int, Tensor] = {}
        self._prepared: dict[Hashable, tuple[Sequence[Callable[[], object]], Any]] = {}
        along = other is not None and (other.dtype, other.shape) == (index.dtype, index.shape)
        for taken in [other, index] if along else [index]:
            results = sorted_pairs(index, taken, size, most)
            self._first, arranged, places, (low, self.high, least, greatest, falls) = results
            check((low, self.high), size, self.edges)
            if 0 <= least and greatest < most:  # else nothing was sorted
                break
        self.places = places if falls else None
        # The other index, if private, is recognised by its memory.
        storage = weakref.ref(taken.untyped_storage()) if is_private(taken) else lambda: None
        self._other = storage, memory_key(taken), (arranged, (least, greatest))

    def in_this_order(self, index: Tensor) -> tuple[Tensor, tuple[int, int]] | None:
        """An index in this order, and its range, if it was the one sorted along; else None."""
        storage, key, sorted_other = self._other
        known = storage() is index.untyped_storage() and key == memory_key(index)
        return sorted_other if known and is_private(index) else None

    def prepared(self, key: Hashable, indices: Sequence[Tensor], make: Callable[[], T]) -> T:
        """An object made once for private indices of these edges, which it must not refer to."""
        full = (key, *map(memory_key, indices))
        storages, result = self._prepared.get(full, ([], None))
        # An address is meaningless once its tensor has been freed.
        if result is None or any(storage() is None for storage in storages):
            result, known = make(), self._prepared.items()
            alive = {k: v for k, v in known if all(storage() is not None for storage in v[0])}
            here = [weakref.ref(x.untyped_storage()) for x in indices]
            self._prepared = {**alive, full: (here, result)}
        return cast(T, result)

    @cacheable
    def starts(self, size: int) -> Tensor:
        """The starts of each node's edges, (size + 1,) int32."""
        if len(self._first) == size + 1:
            return self._first
        if size not in self._starts:
            more = self._first.new_full((size - self.high,), self.edges)
            self._starts[size] = torch.cat([self._first[: self.high + 1], more])
        return self._starts[size]

    @cacheable
    def without_edges(self, size: int) -> Tensor:
        """The nodes less than `size` that have no edges."""
        if size not in self._alone:
            starts = self.starts(size)
            self._alone[size] = (starts[1:] == starts[:-1]).nonzero()[:, 0]
        return self._alone[size]

    @cached_property
    @cacheable
    def places32(self) -> Tensor:
        """:attr:`places` in int32, for edges that were not sorted."""
        assert self.places is not None
        return self.places.to(torch.int32)

    @cached_property
    @cacheable
    def inverse(self) -> Tensor:
        """The position of each original edge in this order, (edges,) int32, if they differ."""
        assert self.places is not None
        numbers = torch.arange(self.edges, dtype=torch.int32)
        return torch.empty_like(numbers).scatter_(0, self.places, numbers)


def order_of(index: Tensor, size: int | None = None, other: Tensor | None = None) -> Order:
    """The order of edges by a vector of nodes.

    size : a bound that exceeds all nodes
    other : an index that will be needed in this order
    """

    def make() -> Order:
        return Order(index, range_of(index)[1] + 1 if size is None else size, other)

    return _kept("order", make, index)


def arranged(values: Tensor, rows: Tensor) -> Tensor:
    """Values of edges, or another index as int32, in the order by `rows`."""

    def make() -> Tensor:
        places = order_of(rows).places
        result = values.clone() if places is None else values.index_select(0, places)
        return result if result.is_floating_point() else result.to(torch.int32)

    return _kept("arranged", make, values, rows)


def places_between(of: Tensor | None, rows: Tensor) -> Tensor | None:
    """The positions, (edges,) int32, of edges in the order by `rows` within the order by `of`, or
    the original order if that is None; None if both orders are the same."""
    to = order_of(rows)
    source, places = to if of is None else order_of(of), to.places
    if of is None or source.places is None:
        return None if places is None else to.places32
    if source is to:
        return None
    if places is None:
        return source.inverse
    return _kept("between", lambda: source.inverse.index_select(0, places), of, rows)


def _kept(key: str, make: Callable[[], T], *owners: Tensor) -> T:
    entry = kept.find(key, *owners)
    return kept.remember(key, make, *owners) if entry is None else entry
