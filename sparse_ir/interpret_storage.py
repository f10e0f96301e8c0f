"""Locations of the elements of sparse buffers: coordinates, positions, offsets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparsetir.sparse_ir.nodes import Axis


@dataclass
class Variable:
    """The value of a variable; for a coordinate also the current position on its axis.

    exact : the unbounded value of a variable bound in the body, for use in coordinates
    """

    value: Any = None
    exact: int | None = None
    axis: str | None = None
    parent: int = 0
    position: int = 0


@dataclass
class Storage:
    """The values of a buffer, flat, in the order of the paper's equations 6 to 8.

    axes : the axes of a sparse buffer, None for a dense one
    dims : sizes of the trees of a sparse buffer, or the shape of a dense one
    leaves : name of the last axis of each tree of a sparse buffer
    """

    name: str
    data: np.ndarray
    axes: list[Axis] | None
    dims: list[int]
    leaves: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Names of each axis and its parent, read once: access to TVM's objects is slow.
        self.levels = [
            (str(a.name), None if a.parent is None else str(a.parent.name)) for a in self.axes or ()
        ]

    def offset(self, positions: Sequence[int]) -> int:
        """Row-major offset of one position per dimension."""
        out = 0
        for position, size in zip(positions, self.dims, strict=True):
            out = out * size + position
        return out


class Structure:
    """Sizes and arrays of a function's axes, by axis name.

    length : number of coordinates
    size : number of positions
    width : slots per parent of a sparse_fixed axis
    indptr, indices : the arrays of the axes that have such
    """

    def __init__(self) -> None:
        self.length: dict[str, int] = {}
        self.size: dict[str, int] = {}
        self.width: dict[str, int] = {}
        self.indptr: dict[str, np.ndarray] = {}
        self.indices: dict[str, np.ndarray] = {}

    def stored(self, axis: Axis, parent: int) -> Iterator[tuple[int, int]]:
        """(position, coordinate) of each element that `axis` stores under a parent position."""
        return self._stored(str(axis.name), parent)

    def _stored(self, name: str, parent: int) -> Iterator[tuple[int, int]]:
        if name in self.indptr:
            start, stop = self.indptr[name][parent : parent + 2].tolist()
        elif name in self.width:
            start, stop = parent * self.width[name], (parent + 1) * self.width[name]
        else:
            start, stop = 0, self.length[name]
        if name not in self.indices:
            yield from zip(range(start, stop), range(stop - start), strict=True)
            return
        for position, coordinate in enumerate(self.indices[name][start:stop].tolist(), start):
            if coordinate >= 0:  # negative: a padded slot
                yield position, coordinate

    def paths(self, axes: list[Axis], by: Axis, part: int) -> Iterator[list[tuple[int, int, int]]]:
        """(parent, position, coordinate) per axis, for each path of one part of the axes.

        axes : each under the one before it
        part : the position of the parent of `by`
        """
        for at in range(*self.indptr[by.name][part : part + 2].tolist()):
            path: list[tuple[int, int, int]] = []
            position = at
            for axis in reversed(axes):
                name, parent, first = axis.name, 0, 0
                if axis.is_variable:
                    parent = int(np.searchsorted(self.indptr[name], position, side="right")) - 1
                    first = int(self.indptr[name][parent])
                elif axis.is_sparse:
                    parent = position // self.width[name]
                coordinate = self.indices[name][position] if axis.is_sparse else position - first
                path.insert(0, (parent, position, int(coordinate)))
                position = parent
            if all(coordinate >= 0 for _, _, coordinate in path):
                yield path

    def find(self, name: str, parent: int, coordinate: int) -> int | None:
        """The first position of a coordinate on an axis; None if it is absent."""
        if not 0 <= coordinate < self.length[name]:
            return None
        if name not in self.indptr and name not in self.indices:
            return coordinate
        return next((p for p, c in self._stored(name, parent) if c == coordinate), None)

    def locate(
        self, storage: Storage, coordinates: list[int], variables: list[Variable | None]
    ) -> int | None:
        """The offset of an element in its storage; None if it is absent."""
        if storage.axes is None:
            for coordinate, size in zip(coordinates, storage.dims, strict=True):
                if not 0 <= coordinate < size:
                    raise IndexError(
                        f"buffer '{storage.name}' of shape {storage.dims}: "
                        f"index {coordinates} is out of range"
                    )
            return storage.offset(coordinates)
        positions: dict[str, int] = {}
        levels = zip(storage.levels, coordinates, variables, strict=True)
        for (name, above), coordinate, variable in levels:
            parent = 0 if above is None else positions[above]
            position: int | None
            if variable and variable.axis == name and variable.parent == parent:
                position = variable.position
            else:
                position = self.find(name, parent, coordinate)
            if position is None:
                return None
            positions[name] = position
        return storage.offset([positions[leaf] for leaf in storage.leaves])


def garbage(count: int, dtype: str) -> np.ndarray:
    """The initial contents of an unwritten buffer: NaN, or the largest integer."""
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        return np.full(count, np.iinfo(kind).max, kind)
    return np.full(count, True if kind.kind == "b" else np.nan, kind)
