"""Edges sorted by one of their indices, made once for each vector of indices and kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from sparsetir.ops.cache import kept, lasting
from sparsetir.ops.compress import sorted_by
from sparsetir.sparse_ir.errors import StructureIndexError

INT32_MAX = 2**31 - 1
T = TypeVar("T")


def check(index: Tensor, size: int) -> None:
    """Raise StructureIndexError unless all nodes of a vector are among so many."""
    low, high = _range(index)
    if low < 0 or high >= size or max(size, len(index)) > INT32_MAX:
        raise StructureIndexError(
            "sparsetir, as backend of torch.compile: an index of edges: expected each node to be "
            f"at least 0 and less than {size}, got {low if low < 0 else high}"
        )


def _range(index: Tensor) -> tuple[int, int]:
    """The least node and the greatest one."""

    def make() -> tuple[int, int]:
        low, high = (int(x) for x in torch.aminmax(index)) if len(index) else (0, -1)
        return low, high

    return _kept("range", make, index)


class Order:
    """Edges sorted by their nodes, which are not negative; those of a node stay in order.

    places : (edges,) int64, of each edge in this order among the given ones; None if that is the
        same
    """

    places: Tensor | None

    def __init__(self, index: Tensor) -> None:
        self.edges, self.high = len(index), _range(index)[1]
        self._starts: dict[int, Tensor] = {}
        self._alone: dict[int, Tensor] = {}
        starts, places = sorted_by(index, self.high + 1)
        self._first = starts.to(torch.int32)
        self.places = None if bool((index[1:] >= index[:-1]).all()) else places

    @lasting
    def starts(self, size: int) -> Tensor:
        """(size + 1,) int32 where the edges of each of so many nodes begin."""
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


def order_of(index: Tensor) -> Order:
    """The order by a vector of nodes."""
    return _kept("order", lambda: Order(index), index)


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
