"""Edges sorted by one of their indices, made once for each vector of indices and kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from sparsetir.ops.cache import is_private, kept, lasting, memory_key
from sparsetir.ops.compress import sorted_pairs
from sparsetir.sparse_ir.errors import StructureIndexError

INT32_MAX = 2**31 - 1
T = TypeVar("T")


def check(nodes: tuple[int, int], size: int, edges: int = 0) -> None:
    """Raise StructureIndexError unless the least and the greatest node are among so many."""
    low, high = nodes
    if low < 0 or high >= size or max(size, edges) > INT32_MAX:
        raise StructureIndexError(
            "sparsetir, as backend of torch.compile: an index of edges: expected each node to be "
            f"at least 0 and less than {size}, got {low if low < 0 else high}"
        )


def range_of(index: Tensor) -> tuple[int, int]:
    """The least node and the greatest one."""

    def make() -> tuple[int, int]:
        low, high = (int(x) for x in torch.aminmax(index)) if len(index) else (0, -1)
        return low, high

    return _kept("range", make, index)


class Order:
    """Edges sorted by their nodes, of which there are so many; those of a node stay in order.

    other : another index, which is brought in this order in the same pass
    places : (edges,) int64, of each edge in this order among the given ones; None if that is the
        same
    """

    places: Tensor | None

    def __init__(self, index: Tensor, size: int, other: Tensor | None) -> None:
        self.edges, most = len(index), INT32_MAX - 1
        self._starts: dict[int, Tensor] = {}
        self._alone: dict[int, Tensor] = {}
        self._prepared: dict[Hashable, tuple[Sequence[Callable[[], object]], Any]] = {}
        along = other is not None and (other.dtype, other.shape) == (index.dtype, index.shape)
        for taken in [other, index] if along else [index]:
            found = sorted_pairs(index, taken, size, most)
            self._first, arranged, places, (low, self.high, least, greatest, falls) = found
            check((low, self.high), size, self.edges)
            if 0 <= least and greatest < most:  # else nothing was sorted
                break
        self.places = places if falls else None
        # Of an index that nobody writes to, known again by its memory.
        storage = weakref.ref(taken.untyped_storage()) if is_private(taken) else lambda: None
        self._other = storage, memory_key(taken), (arranged, (least, greatest))

    def taken_along(self, index: Tensor) -> tuple[Tensor, tuple[int, int]] | None:
        """An index in this order, and its range, if it was sorted with it."""
        storage, key, found = self._other
        known = storage() is index.untyped_storage() and key == memory_key(index)
        return found if known and is_private(index) else None

    def prepared(self, key: Hashable, indices: Sequence[Tensor], make: Callable[[], T]) -> T:
        """What is made once for private indices of these edges, which it may not refer to."""
        full = (key, *map(memory_key, indices))
        storages, found = self._prepared.get(full, ([], None))
        # An address says nothing where what was there has been freed.
        if found is None or any(storage() is None for storage in storages):
            found, known = make(), self._prepared.items()
            alive = {k: v for k, v in known if all(storage() is not None for storage in v[0])}
            here = [weakref.ref(x.untyped_storage()) for x in indices]
            self._prepared = {**alive, full: (here, found)}
        return cast(T, found)

    @lasting
    def starts(self, size: int) -> Tensor:
        """(size + 1,) int32 where the edges of each of so many nodes begin."""
        if len(self._first) == size + 1:
            return self._first
        if size not in self._starts:
            more = self._first.new_full((size - self.high,), self.edges)
            self._starts[size] = torch.cat([self._first[: self.high + 1], more])
        return self._starts[size]

    @lasting
    def without_edges(self, size: int) -> Tensor:
        """Those of so many nodes that have none."""
        if size not in self._alone:
            starts = self.starts(size)
            self._alone[size] = (starts[1:] == starts[:-1]).nonzero()[:, 0]
        return self._alone[size]

    @cached_property
    @lasting
    def places32(self) -> Tensor:
        """:attr:`places` in int32, of edges that are not in order."""
        assert self.places is not None
        return self.places.to(torch.int32)

    @cached_property
    @lasting
    def inverse(self) -> Tensor:
        """(edges,) int32, where each given edge is in this order, which is another one."""
        assert self.places is not None
        found = torch.empty(self.edges, dtype=torch.int32)
        found[self.places] = torch.arange(self.edges, dtype=torch.int32)
        return found


def order_of(index: Tensor, size: int | None = None, other: Tensor | None = None) -> Order:
    """The order by a vector of nodes.

    size : more than each of them
    other : an index that will be wanted in this order
    """

    def make() -> Order:
        return Order(index, range_of(index)[1] + 1 if size is None else size, other)

    return _kept("order", make, index)


def arranged(values: Tensor, rows: Tensor) -> Tensor:
    """Values of edges, or another index in int32, in the order by `rows`."""

    def make() -> Tensor:
        places = order_of(rows).places
        found = values.clone() if places is None else values[places]
        return found if found.is_floating_point() else found.to(torch.int32)

    return _kept("arranged", make, values, rows)


def places_between(of: Tensor | None, rows: Tensor) -> Tensor | None:
    """(edges,) int32 where edges in the order by `rows` are in that by `of`, None for the given
    one; None where both orders are the same."""
    to = order_of(rows)
    source = to if of is None else order_of(of)
    if of is None or source.places is None:
        return None if to.places is None else to.places32
    if source is to:
        return None
    if to.places is None:
        return source.inverse
    return _kept("between", lambda: source.inverse[to.places], of, rows)


def _kept(key: str, make: Callable[[], T], *owners: Tensor) -> T:
    found = kept.find(key, *owners)
    return kept.remember(key, make, *owners) if found is None else found
