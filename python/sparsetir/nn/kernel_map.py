"""Kernel maps: the pairs of inputs and outputs for each offset of a convolution.

They are computed on sorted 64-bit keys, by a few vector operations for each offset. (SparseTIR,
section 4.4.2: a sparse convolution is relational gather-matmul-scatter, offsets being relations.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

import numpy as np

MAX_PLACES = 1 << 62
Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Convolution:
    """The geometry of a convolution: output o reads o * stride - padding + k * dilation.

    k goes from 0 to kernel_size - 1 in each of x, y and z; offsets count z fastest.
    """

    kernel_size: Triple
    stride: Triple = (1, 1, 1)
    padding: Triple = (0, 0, 0)
    dilation: Triple = (1, 1, 1)

    @property
    def offsets(self) -> int:
        """The number of offsets, which are relations."""
        return prod(self.kernel_size)

    @property
    def numbers(self) -> tuple[int, ...]:
        """All fields as a flat tuple, for operators."""
        return (*self.kernel_size, *self.stride, *self.padding, *self.dilation)

    @staticmethod
    def from_numbers(numbers: Sequence[int]) -> Convolution:
        """The convolution of :attr:`numbers`."""
        x, y, z = numbers[::3], numbers[1::3], numbers[2::3]
        return Convolution(*zip(x, y, z, strict=True))

    @staticmethod
    def submanifold(kernel_size: Triple, dilation: Triple) -> Convolution:
        """A convolution with as many outputs as inputs, like `padding="same"` of dense ones."""
        left = [d * (k - 1) // 2 for k, d in zip(kernel_size, dilation, strict=True)]
        return Convolution(kernel_size, padding=(left[0], left[1], left[2]), dilation=dilation)


@dataclass(frozen=True)
class Sorted:
    """Distinct points in lexicographic order.

    columns : (4, n) int64 of batch, x, y and z
    order : (n,) int64 positions among the user's points; None if these are sorted
    """

    columns: np.ndarray
    order: np.ndarray | None = None

    def __len__(self) -> int:
        return self.columns.shape[1]

    @staticmethod
    def of(coords: np.ndarray) -> Sorted:
        """Sort points (n, 4).

        Raises ValueError, to be prefixed by "caller: argument 'coords': ", for duplicate points or
        points that are too far apart.
        """
        columns = np.ascontiguousarray(coords.T, np.int64)
        if not len(coords):
            return Sorted(columns)
        box = _Box.around(columns)
        keys = box.keys(columns)
        if (keys[1:] > keys[:-1]).all():
            return Sorted(columns)
        order = _order(keys, prod(box.sizes))
        keys, columns = keys[order], columns[:, order]
        again = np.flatnonzero(keys[1:] == keys[:-1])
        if len(again):
            raise ValueError(f"expected each point once, got {columns[:, again[0]].tolist()} again")
        return Sorted(columns, order)


@dataclass(frozen=True)
class Pairs:
    """Relational structure (CSF by relation) with one input in each row, for RGMS.

    row_ptr : (offsets + 1,) int64 starts of each offset's pairs
    rows : (pairs,) outputs, ascending for each offset
    indices : (pairs,) inputs
    """

    row_ptr: np.ndarray
    rows: np.ndarray
    indices: np.ndarray

    @staticmethod
    def of(pairs: list[tuple[np.ndarray, np.ndarray]]) -> Pairs:
        """Join outputs and inputs of each offset."""
        row_ptr = np.append(0, np.cumsum([len(rows) for rows, _ in pairs])).astype(np.int64)
        rows, indices = (np.concatenate(x) for x in zip(*pairs, strict=True))
        return Pairs(row_ptr, rows, indices)


@dataclass(frozen=True)
class _Box:
    """A numbering of points by keys: positions in a box that contains them all.

    low : (4,) least coordinates
    sizes : lengths of the box
    """

    low: np.ndarray
    sizes: tuple[int, ...]
    radix: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if prod(self.sizes) > MAX_PLACES:
            raise ValueError(f"expected a box of at most 2^62 places, got {self.sizes}")
        places = [prod(self.sizes[at + 1 :]) for at in range(4)]
        object.__setattr__(self, "radix", tuple(places))

    @staticmethod
    def around(*points: np.ndarray, margin: tuple[int, ...] = (0, 0, 0, 0)) -> _Box:
        """The bounding box of points, not all empty, enlarged by `margin` in each dimension."""
        nonempty = [x for x in points if x.shape[1]]
        low = np.min([x.min(1) for x in nonempty], axis=0)
        high = np.max([x.max(1) for x in nonempty], axis=0)
        return _Box(
            low, tuple(int(h - n) + 1 + s for n, h, s in zip(low, high, margin, strict=True))
        )

    def keys(self, columns: np.ndarray) -> np.ndarray:
        """The keys of points, (n,) int64, ascending in lexicographic order."""
        key = columns[0] - self.low[0]
        for dim in range(1, 4):
            key *= self.sizes[dim]
            key += columns[dim] - self.low[dim]
        return key

    def columns(self, keys: np.ndarray) -> np.ndarray:
        """The coordinates of keys, (4, n)."""
        out = np.empty((4, len(keys)), np.int64)
        for dim in (3, 2, 1):
            rest = keys // self.sizes[dim]
            out[dim] = keys - rest * self.sizes[dim] + self.low[dim]
            keys = rest
        out[0] = keys + self.low[0]
        return out


# -- outputs at inputs -----------------------------------------------------------------------------


def submanifold(points: Sorted, conv: Convolution) -> Pairs:
    """The pairs of a convolution of stride 1 whose outputs are at its inputs.

    One search serves a column of offsets, as neighbours along z are adjacent. In kernels with a
    centre each pair recurs, reversed, at the opposite offset.
    """
    n, kernel = len(points), conv.kernel_size
    nothing = np.zeros(0, np.int32)
    pairs_of = [(nothing, nothing)] * conv.offsets
    if not n:
        return Pairs.of(pairs_of)
    spans = [d * (k - 1) for k, d in zip(kernel, conv.dilation, strict=True)]
    box = _Box.around(points.columns, margin=(0, *spans))
    keys = box.keys(points.columns)
    mirrored = all(k % 2 for k in kernel)
    for at, places, hits in _columns(keys, box, conv):
        rows = np.flatnonzero(hits).astype(np.int32)
        inputs = places[rows].astype(np.int32)
        pairs_of[at] = rows, inputs
        if mirrored:
            pairs_of[-1 - at] = inputs, rows
    if mirrored:
        every = np.arange(n, dtype=np.int32)
        pairs_of[conv.offsets // 2] = every, every
    pairs = Pairs.of(pairs_of)
    if points.order is None:
        return pairs
    order = points.order.astype(np.int32)
    return in_row_order(Pairs(pairs.row_ptr, order[pairs.rows], order[pairs.indices]), n)


def _columns(
    keys: np.ndarray, box: _Box, conv: Convolution
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield offsets (the first half, if there is a centre), positions in `keys`, and matches."""
    (kx, ky, kz), (px, py, pz), (dx, dy, dz) = conv.kernel_size, conv.padding, conv.dilation
    last = conv.offsets // 2 if kx % 2 and ky % 2 and kz % 2 else conv.offsets
    ended = np.append(keys, np.iinfo(np.int64).max)
    for i, j in product(range(kx), range(ky)):
        column = (i * ky + j) * kz
        wanted = keys + (i * dx - px) * box.radix[1] + (j * dy - py) * box.radix[2] - pz
        places = hits = None
        for k in range(min(kz, last - column)):
            if places is None or hits is None or dz > 1:
                places = np.searchsorted(keys, wanted)
            else:
                places = places + hits
            hits = ended[places] == wanted
            yield column + k, places, hits
            wanted = wanted + dz


# -- outputs elsewhere -----------------------------------------------------------------------------


def reached(points: Sorted, conv: Convolution) -> tuple[Pairs, Sorted]:
    """The pairs of a convolution whose outputs are all that an input reaches, and these outputs."""
    nothing = np.zeros(0, np.int32)
    candidates, box = _candidates(points, conv)
    keys = np.concatenate([key for _, key in candidates])
    if not len(keys):
        return Pairs.of([(nothing, nothing)] * conv.offsets), Sorted(np.zeros((4, 0), np.int64))
    assert box is not None
    order = _order(keys, prod(box.sizes))
    in_order = keys[order]
    new = np.append(True, in_order[1:] != in_order[:-1])
    row = np.empty(len(keys), np.int32)
    row[order] = np.cumsum(new, dtype=np.int32) - 1
    ends = np.cumsum([len(inputs) for inputs, _ in candidates])[:-1]
    rows = np.split(row, ends)
    pairs = [(r, inputs) for r, (inputs, _) in zip(rows, candidates, strict=True)]
    return _user_inputs(Pairs.of(pairs), points), Sorted(box.columns(in_order[new]))


def between(points: Sorted, conv: Convolution, outputs: Sorted) -> Pairs:
    """The pairs of a convolution with given outputs, which need not be all, nor be reached."""
    candidates, box = _candidates(points, conv, outputs.columns)
    pairs_of = []
    keys = None if box is None else np.append(box.keys(outputs.columns), np.iinfo(np.int64).max)
    for inputs, wanted in candidates:
        places = wanted[:0] if keys is None else np.searchsorted(keys, wanted)
        hits = np.zeros(0, bool) if keys is None else keys[places] == wanted
        pairs_of.append((places[hits].astype(np.int32), inputs[hits]))
    pairs = _user_inputs(Pairs.of(pairs_of), points)
    if outputs.order is None:
        return pairs
    order = outputs.order.astype(np.int32)
    moved = Pairs(pairs.row_ptr, order[pairs.rows], pairs.indices)
    return in_row_order(moved, len(outputs))


def _candidates(
    points: Sorted, conv: Convolution, others: np.ndarray | None = None
) -> tuple[list[tuple[np.ndarray, np.ndarray]], _Box | None]:
    """For each offset, the inputs that reach an output by it, and the outputs' keys, ascending.

    The keys are those of a box around the outputs and `others`, None without inputs.
    """
    columns, nothing = points.columns, np.zeros(0, np.int32)
    if not len(points):
        return [(nothing, nothing.astype(np.int64))] * conv.offsets, None
    # For each dimension and k, the quotient by the stride, and where it is exact.
    reach = []
    for at, (size, stride, padding, dilation) in enumerate(
        zip(conv.kernel_size, conv.stride, conv.padding, conv.dilation, strict=True), 1
    ):
        moved = [columns[at] + (padding - k * dilation) for k in range(size)]
        reach.append([_whole(x, stride) for x in moved])
    ends = [[columns[0].min(), columns[0].max()]]
    ends += [[f(q) for f, (q, _) in ((np.min, of[-1]), (np.max, of[0]))] for of in reach]
    box = _Box.around(np.array(ends), *([] if others is None else [others]))
    # An offset's inputs are filtered dimension by dimension.
    candidates = [(np.arange(len(points), dtype=np.int32), columns[0] - box.low[0])]
    for at, of in enumerate(reach, 1):
        before, candidates = candidates, []
        for (inputs, keys), (quotient, whole) in product(before, of):
            if whole is not None:
                left = np.flatnonzero(whole[inputs])
                inputs, keys = inputs[left], keys[left]
            candidates.append((inputs, keys * box.sizes[at] + (quotient[inputs] - box.low[at])))
    return candidates, box


def _whole(x: np.ndarray, stride: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return x / stride, rounded down, and where it is exact; None for everywhere."""
    if stride == 1:
        return x, None
    quotient = x // stride
    return quotient, quotient * stride == x


def _user_inputs(pairs: Pairs, points: Sorted) -> Pairs:
    """Renumber inputs in the user's order."""
    if points.order is None:
        return pairs
    return Pairs(pairs.row_ptr, pairs.rows, points.order[pairs.indices].astype(np.int32))


def in_row_order(pairs: Pairs, rows: int) -> Pairs:
    """Sort the pairs of each offset by row; rows : number of rows."""
    offset = np.repeat(np.arange(len(pairs.row_ptr) - 1), np.diff(pairs.row_ptr))
    keys = offset * rows + pairs.rows
    if (keys[1:] > keys[:-1]).all():
        return pairs
    order = _order(keys, (len(pairs.row_ptr) - 1) * rows)
    return Pairs(pairs.row_ptr, pairs.rows[order], pairs.indices[order])


def _order(keys: np.ndarray, bound: int) -> np.ndarray:
    """The permutation, (n,) int64, that sorts keys from 0 up to a bound.

    Sorting numbers that combine a key and its position takes 0.6 of the time of `argsort`.
    """
    bits = len(keys).bit_length()
    if bound > np.iinfo(np.int64).max >> bits:
        return np.argsort(keys)
    both = np.sort((keys << bits) | np.arange(len(keys)))
    return both & ((1 << bits) - 1)
