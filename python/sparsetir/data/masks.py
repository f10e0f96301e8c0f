"""Attention masks in blocks: the pairs of queries and keys that attend.

>>> from sparsetir import masks
>>> masks.band(4096, 256)
<BlockMask (4096, 4096), 314 blocks of 64, 1036160 elements>
>>> masks.band(4096, 256) & masks.causal(4096)
<BlockMask (4096, 4096), 189 blocks of 64, 520128 elements>

Rows are queries and columns are keys, as in the masks of `scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparsetir import needs_torch  # noqa: F401  # isort: skip
from torch import Tensor

from sparsetir.data.mask_blocks import BLOCKS, WORD, BlockMask, Stored, packed
from sparsetir.runtime.refusals import wrong
from sparsetir.sparse_ir.index_arrays import check_indptr, check_range, is_integer

__all__ = [
    "BlockMask", "band", "bigbird", "blocks", "butterfly", "causal", "from_dense", "from_elements",
    "global_tokens",
]  # fmt: skip

# Elements processed at a time.
CHUNK = 1 << 22


def band(length: int, width: int, block: int = 64) -> BlockMask:
    """A mask where each position attends to width // 2 positions on either side, and itself.

    Parameters
    ----------
    length : int
        Length of the sequence.
    width : int
        Width of the band: (i, j) with `|i - j| <= width // 2`.
    block : {16, 32, 64, 128}
        Rows and columns of a block.

    Returns
    -------
    BlockMask

    Notes
    -----
    The sliding window of Longformer (Beltagy, Peters and Cohan, 2020, section 3.1).
    """
    length, size = _count("band", "length", length), _size("band", block)
    reach = _count("band", "width", width) // 2
    count = -(-length // size)
    io = np.arange(count)
    first = np.maximum(io * size - reach, 0) // size
    last = np.minimum((io * size + size - 1 + reach) // size, count - 1)
    row, column = _ranges(first, last)
    return _made((length, length), size, row, column, lambda i, j: abs(i - j) <= reach)


def causal(length: int, block: int = 64) -> BlockMask:
    """A mask where each position attends to itself and those before it: (i, j) with j <= i.

    For a causal variant of another mask: `mask & causal(length)`.

    Parameters
    ----------
    length : int
        Length of the sequence.
    block : {16, 32, 64, 128}
        Rows and columns of a block.

    Returns
    -------
    BlockMask
    """
    length, size = _count("causal", "length", length), _size("causal", block)
    io = np.arange(-(-length // size))
    row, column = _ranges(0 * io, io)
    return _made((length, length), size, row, column, lambda i, j: j <= i)


def global_tokens(length: int, tokens: Sequence[int], block: int = 64) -> BlockMask:
    """A mask where some positions attend to all, and all attend to them.

    For a window with global tokens: `band(length, width) | global_tokens(length, tokens)`.

    Parameters
    ----------
    length : int
        Length of the sequence.
    tokens : sequence of int
        The positions, 0 to length - 1.
    block : {16, 32, 64, 128}
        Rows and columns of a block.

    Returns
    -------
    BlockMask

    Notes
    -----
    The global attention of Longformer (Beltagy, Peters and Cohan, 2020, section 3.1).
    """
    caller = "global_tokens"
    length, size = _count(caller, "length", length), _size(caller, block)
    pos = np.asarray(tokens)
    if pos.ndim != 1 or pos.size and pos.dtype.kind not in "iu":
        raise wrong(
            caller, "tokens", "integers of 1 dimension", f"{pos.dtype} of shape {pos.shape}"
        )
    check_range(f"{caller}: argument 'tokens'", pos, length, "positions")
    count = -(-length // size)
    chosen = np.zeros(count * size, bool)
    chosen[pos.astype(np.int64)] = True
    some = np.asarray(chosen.reshape(count, size).any(1))
    row, column = np.nonzero(some[:, None] | some)
    return _made((length, length), size, row, column, lambda i, j: chosen[i] | chosen[j])


def butterfly(length: int, block: int = 64) -> BlockMask:
    """The flat block butterfly: blocks (i, j) where i = j, or i and j differ in one binary digit.

    Parameters
    ----------
    length : int
        Length of the sequence.
    block : {16, 32, 64, 128}
        Rows and columns of a block.

    Returns
    -------
    BlockMask

    Notes
    -----
    Each of n blocks attends to about log2(n) + 1. (Dao et al., Pixelated Butterfly, 2022, section
    3.2: the sum of the factors of a block butterfly matrix, instead of their product, with the
    largest stride.) If the number of blocks is not a power of two, those beyond it are dropped.
    """
    length, size = _count("butterfly", "length", length), _size("butterfly", block)
    count = -(-length // size)
    io = np.arange(count)
    strides = [0, *(1 << s for s in range(max(count - 1, 0).bit_length()))]
    row, column = np.tile(io, len(strides)), np.concatenate([io ^ s for s in strides])
    kept = column < count
    return _made((length, length), size, row[kept], column[kept], None)


def bigbird(
    length: int, block: int = 64, window: int = 3, ends: int = 1, random: int = 3, seed: int = 0
) -> BlockMask:
    """A mask of nearby blocks, of global blocks that attend to all and vice versa, and random ones.

    Parameters
    ----------
    length : int
        Length of the sequence.
    block : {16, 32, 64, 128}
        Rows and columns of a block.
    window : int
        Number of adjacent blocks, odd, that each block attends to, with itself in the middle.
    ends : int
        Number of global blocks at the beginning, with complete rows and columns.
    random : int
        Number of further blocks that each block attends to.
    seed : int
        Seed of the choice of these.

    Returns
    -------
    BlockMask

    Notes
    -----
    Zaheer et al., Big Bird, 2020, section 2 and appendix D.
    """
    caller = "bigbird"
    length, size = _count(caller, "length", length), _size(caller, block)
    window, ends = _count(caller, "window", window), _count(caller, "ends", ends)
    random = _count(caller, "random", random)
    if window % 2 == 0:
        raise wrong(caller, "window", "an odd number", window)
    rng, count = np.random.default_rng(_count(caller, "seed", seed)), -(-length // size)
    rows: list[np.ndarray] = []
    for io in range(count):
        here = np.zeros(count, bool)
        here[max(0, io - window // 2) : io + window // 2 + 1] = True
        here[:ends] = True
        here |= io < ends
        others = np.flatnonzero(~here)
        here[rng.choice(others, min(random, len(others)), replace=False)] = True
        rows.append(np.flatnonzero(here))
    row = np.repeat(np.arange(count), [len(columns) for columns in rows])
    return _made((length, length), size, row, np.concatenate([*rows, row[:0]]), None)


def blocks(table: object, block: int = 64, shape: Sequence[int] | None = None) -> BlockMask:
    """A mask of all elements of the blocks that a table marks.

    Parameters
    ----------
    table : (block rows, block columns) bool
        An array of NumPy or torch.
    block : {16, 32, 64, 128}
        Rows and columns of a block.
    shape : (int, int), optional
        (m, n) elements; by default for whole blocks.

    Returns
    -------
    BlockMask
    """
    size = _size("blocks", block)
    marks = _table("blocks", "table", table)
    whole = (marks.shape[0] * size, marks.shape[1] * size)
    sizes = whole if shape is None else tuple(shape)
    if len(sizes) != 2 or tuple(-(-n // size) for n in sizes) != marks.shape:
        raise wrong("blocks", "shape", f"(m, n) of {marks.shape} blocks of {size}", sizes)
    row, column = np.nonzero(marks)
    return _made((int(sizes[0]), int(sizes[1])), size, row, column, None)


def from_elements(
    indptr: np.ndarray, indices: np.ndarray, shape: tuple[int, int], block: int = 64
) -> BlockMask:
    """A mask of elements in CSR, stored in the nonempty blocks.

    Parameters
    ----------
    indptr : (m + 1,) ndarray
        Row pointers.
    indices : (nnz,) ndarray
        Columns, without duplicates in a row.
    shape : (int, int)
        (m, n) elements.
    block : {16, 32, 64, 128}
        Rows and columns of a block.

    Returns
    -------
    BlockMask

    Raises
    ------
    ValueError
        For duplicate elements, or elements out of range.
    """
    size = _size("from_elements", block)
    check_indptr("from_elements", indptr, len(indices), shape[0])
    check_range("from_elements: argument 'indices'", indices, shape[1], "integers")
    i = np.repeat(np.arange(shape[0]), np.diff(indptr))
    wide = max(1, -(-shape[1] // size))
    key = i // size * np.int64(wide) + indices // size
    keys, place = np.unique(key, return_inverse=True)
    words = np.zeros((len(keys), size, size // WORD), np.uint16)
    where = (place.reshape(-1), indices % size, i % size // WORD)
    np.bitwise_or.at(words, where, (1 << (i % WORD)).astype(np.uint16))
    stored = Stored.sorted(size, keys // wide, keys % wide, words)
    if stored.nnz != len(indices):
        raise ValueError("from_elements: argument 'indices': expected each element once")
    return stored.mask(shape)


def from_dense(mask: object, block: int = 64) -> BlockMask:
    """A mask from a dense one, stored in the nonempty blocks.

    Parameters
    ----------
    mask : (m, n) bool
        An array of NumPy or torch: whether query i attends to key j.
    block : {16, 32, 64, 128}
        Rows and columns of a block.

    Returns
    -------
    BlockMask

    Raises
    ------
    ValueError
        For other types than bool, such as numbers to add to scores.
    """
    dense = _table("from_dense", "mask", mask)
    rows, columns = np.nonzero(dense)
    indptr = np.searchsorted(rows, np.arange(len(dense) + 1))
    return from_elements(indptr, columns, (dense.shape[0], dense.shape[1]), block)


def _made(
    shape: tuple[int, int],
    size: int,
    row: np.ndarray,
    column: np.ndarray,
    holds: Callable[[np.ndarray, np.ndarray], np.ndarray] | None,
) -> BlockMask:
    """The mask of the elements of some blocks where `holds(i, j)`, or of all if that is None."""
    within = np.arange(size)
    words = np.empty((len(row), size, size // WORD), np.uint16)
    step = max(1, CHUNK // size**2)
    for begin in range(0, len(row), step):
        here = slice(begin, begin + step)
        i = row[here, None, None] * size + within[:, None]
        j = column[here, None, None] * size + within
        inside = (i < shape[0]) & (j < shape[1])
        words[here] = packed(inside if holds is None else inside & holds(i, j))
    return Stored.sorted(size, row, column, words).mask(shape)


def _ranges(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the blocks from first to last, inclusive, in each row."""
    counts = last - first + 1
    row = np.repeat(np.arange(len(first)), counts)
    begins = np.repeat(np.cumsum(counts) - counts, counts)
    return row, np.arange(len(row)) - begins + first[row]


# -- arguments ------------------------------------------------------------------------------------


def _count(caller: str, name: str, value: Any) -> int:
    if not is_integer(value):
        raise wrong(caller, name, "an integer", type(value).__name__, TypeError)
    if value < 0:
        raise wrong(caller, name, "0 or more", value)
    return int(value)


def _table(caller: str, name: str, value: object) -> np.ndarray:
    table = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
    if table.ndim != 2 or table.dtype != bool:
        expected, got = "booleans of 2 dimensions", f"{table.dtype} of shape {table.shape}"
        raise wrong(caller, name, expected, got)
    return table


def _size(caller: str, value: Any) -> int:
    if not is_integer(value) or value not in BLOCKS:
        sizes = ", ".join(map(str, BLOCKS[:-1]))
        raise wrong(caller, "block", f"{sizes} or {BLOCKS[-1]}", f"{value!r}")
    return int(value)
