"""The positions of a format's slots in the matrix, and in a picture of the storage."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from tvm import ir, tirx
from tvm.sym import Analyzer

from sparsetir.formats.format_part import FormatPart
from sparsetir.plotting.marks import Colour
from sparsetir.runtime.texts import many
from sparsetir.sparse_ir.nodes import substitute

SHOWN = 20  # most parts with a separate line in the legend
GAP = 0.5  # gap between blocks, in squares
LARGEST = 2**14  # most slots that are drawn one by one, over all parts
WIDEST = 256  # squares
WINDOW = 48  # rows and columns of the part of a large matrix that is drawn beside it
PIXELS = 256  # most rows and columns of the picture of a large matrix


class Located(NamedTuple):
    """The positions of a part's slots.

    slots : for each new axis the slot below its parent
    rows, cols : coordinates in the matrix, which may lie beyond its edge
    valid : whether coordinates exist; false below a slot with a negative index
    """

    slots: dict[str, np.ndarray]
    rows: np.ndarray
    cols: np.ndarray
    valid: np.ndarray


def locate(part: FormatPart, places: np.ndarray) -> Located:
    """Follow slots, numbered as in the flat values, up to the roots of the axes."""
    rule = part.rule
    axes = [rule.axis(n) for n in rule.axes_after_rewrite]
    arrays = {a.name: (_array(part, a.indptr), _array(part, a.indices)) for a in axes}
    total: dict[str, int] = {}
    for axis in axes:
        indptr, indices = arrays[axis.name]
        if axis.kind == "dense_fixed":
            total[axis.name] = _number(part, axis.length)
        else:
            total[axis.name] = len(indices) if indices is not None else int(indptr[-1])
    positions: dict[str, np.ndarray] = {}
    slots: dict[str, np.ndarray] = {}
    coords: dict[str, np.ndarray] = {}
    valid = np.ones(len(places), bool)
    rest = places
    for leaf in reversed(rule.leaves):
        rest, position = np.divmod(rest, max(1, total[leaf.name]))
        axis = leaf
        while axis is not None:
            name, (indptr, indices) = axis.name, arrays[axis.name]
            if name in positions:  # two leaves that share an axis must agree on it
                valid &= positions[name] == position
                break
            positions[name] = slots[name] = position
            if indptr is not None:
                position = np.searchsorted(indptr, position, "right") - 1
                slots[name] = positions[name] - indptr[position]
            elif axis.parent is not None:
                position, slots[name] = np.divmod(position, max(1, _number(part, axis.nnz_cols)))
            coords[name] = slots[name] if indices is None else indices[positions[name]]
            valid &= coords[name] >= 0
            axis = axis.parent
    old = rule.to_old([coords[n] for n in rule.axes_after_rewrite])
    rows, cols = (np.broadcast_to(np.asarray(c), len(places)) for c in old)
    return Located(slots, rows, cols, valid)


def _array(part: FormatPart, handle: Any) -> Any:
    return None if handle is None else part.indices[part.rule.renamed(str(handle.name))]


def _number(part: FormatPart, expr: Any) -> int:
    """The value of a size."""
    if not isinstance(expr, tirx.IntImm):
        sizes = {
            p: tirx.IntImm(str(p.ty.dtype), int(part.indices[part.rule.renamed(str(p.name))]))
            for p in part.rule.new_format_desc.params
            if not isinstance(p.ty, ir.PointerType)
        }
        expr = Analyzer().simplify(substitute(expr, sizes))
    return int(expr)


def sample(part: FormatPart, limit: int) -> np.ndarray:
    """All slots of a part in order; a random sample of `limit` if there are more."""
    if part.size <= limit:
        return np.arange(part.size)
    places = np.random.default_rng(0).integers(part.size, size=limit)
    places.sort()
    return places


class Squares(NamedTuple):
    """The slots of a part in the picture of the storage; each array has one value per slot.

    x, y : centres, to the right and down
    stored : whether the slot holds an element
    valid : whether the slot has coordinates in the matrix
    """

    x: np.ndarray
    y: np.ndarray
    stored: np.ndarray
    valid: np.ndarray


class Layout(NamedTuple):
    """The picture of the storage: squares of each part, and the extent of all."""

    parts: list[Squares]
    width: float
    height: float


def storage_layout(parts: list[FormatPart], rows: int) -> Layout | None:
    """Place parts below each other, in columns about as high as the `rows` of the matrix.

    parts : parts with at least one slot
    Returns None if there are too many slots for a square each.
    """
    if sum(p.size for p in parts) > LARGEST:
        return None
    limit = max(16, rows)
    squares = [_part_squares(part, limit) for part in parts]
    highest = max([limit, *(s.y.max() + 1 for s in squares)])
    left = top = width = height = 0.0
    for n, part in enumerate(squares):
        wide, high = part.x.max() + 1, part.y.max() + 1
        if top and top + high > highest:
            left, top, width = left + width + 2, 0.0, 0.0
        squares[n] = part._replace(x=part.x + left, y=part.y + top)
        width, height = max(width, wide), max(height, top + high)
        top += high + 1
    if left + width > WIDEST:
        return None
    return Layout(squares, max(1.0, left + width), max(1.0, height))


def _part_squares(part: FormatPart, limit: int) -> Squares:
    """Place axes from rows downwards, those from columns to the right."""
    where = locate(part, np.arange(part.size))
    down, right = (
        [where.slots[n] for n in part.rule.axis_map[axis] if where.slots[n].any()]
        for axis in part.rule.axes_before_rewrite
    )
    x, y = _joined(right, part.size), _joined(down, part.size)
    if len(down) == 1:  # no blocks: a high part, such as a list of elements, is split into columns
        x, y = x + y // limit * (x.max() + 2), y % limit
    return Squares(x, y, part.mask.reshape(-1) != 0, where.valid)


def _joined(slots: list[np.ndarray], places: int) -> np.ndarray:
    """Combine slots on several axes, outermost first, into one number, with gaps around blocks."""
    out = np.zeros(places)
    for slot in slots:
        out = out * (int(slot.max()) + 1 + GAP) + slot
    return out


class Pixels(NamedTuple):
    """The picture of a large matrix. Pixels have equal sizes, so that none stands out.

    each : numbers of rows and columns in a pixel
    count : numbers of pixel rows and columns of the picture
    """

    each: tuple[int, int]
    count: tuple[int, int]

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> Pixels:
        """The largest picture of a matrix."""
        high, wide = (max(1, -(-n // PIXELS)) for n in shape)
        return cls((high, wide), (max(1, -(-shape[0] // high)), max(1, -(-shape[1] // wide))))

    def number(self, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        """The pixel of each coordinate, row by row."""
        return (rows // self.each[0]).astype(np.int64) * self.count[1] + cols // self.each[1]


class Window(NamedTuple):
    """A part of a large matrix that is drawn element by element.

    rows, cols : the first, and the one after the last
    """

    rows: tuple[int, int]
    cols: tuple[int, int]

    @classmethod
    def of(cls, rows: np.ndarray, cols: np.ndarray, shape: tuple[int, ...]) -> Window:
        """The window that stores most, the first of equals, among disjoint ones."""
        across = max(1, -(-shape[1] // WINDOW))
        number = (rows // WINDOW).astype(np.int64) * across + cols // WINDOW
        windows, counts = np.unique(number, return_counts=True)
        most = int(windows[counts.argmax()]) if len(windows) else 0
        top, left = (
            max(0, min(n * WINDOW, length - WINDOW))
            for n, length in zip(divmod(most, across), shape, strict=True)
        )
        ends = (min(s + WINDOW, max(1, n)) for s, n in zip((top, left), shape, strict=True))
        return cls(*zip((top, left), ends, strict=True))

    def holds(self, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        """A mask of the coordinates inside the window."""
        inside = (rows >= self.rows[0]) & (rows < self.rows[1])
        return inside & (cols >= self.cols[0]) & (cols < self.cols[1])


class Part(NamedTuple):
    """A line of the legend: a part with slots, or several small ones together.

    name : a description of the contents
    arrays : the arrays of one part
    """

    name: str
    colour: Colour
    stored: int
    places: int
    arrays: FormatPart

    @property
    def text(self) -> str:
        """Name, elements and padding."""
        padding = 100 * (1 - self.stored / self.places)
        return f"{self.name}: {many(self.stored, 'element')}, {padding:.1f} % padding"


def joined(parts: list[Part]) -> list[Part]:
    """A line for each part, or for the largest and one for the rest."""
    if len(parts) <= SHOWN:
        return parts
    largest = set(np.argsort([-p.places for p in parts], kind="stable")[: SHOWN - 1].tolist())
    rest = [p for n, p in enumerate(parts) if n not in largest]
    stored, places = sum(p.stored for p in rest), sum(p.places for p in rest)
    together = Part(f"{len(rest)} smaller parts", np.full(3, 0.5), stored, places, rest[0].arrays)
    return [p for n, p in enumerate(parts) if n in largest] + [together]
