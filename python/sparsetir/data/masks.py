"""Masks of attention: which queries attend to which keys, in blocks.

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

# Elements that are looked at at a time.
CHUNK = 1 << 22


def band(length: int, width: int, block: int = 64) -> BlockMask:
    """Each position attends to width // 2 positions before it, as many after it, and itself.

    Parameters
    ----------
    length : int
        Of the sequence.
    width : int
        Of the band: (i, j) with `|i - j| <= width // 2`.
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
    """Each position attends to itself and those before it: (i, j) with j <= i.

    For a causal variant of another mask: `mask & causal(length)`.

    Parameters
    ----------
    length : int
        Of the sequence.
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
    """Some positions attend to all, and all attend to them.

    For a window with global tokens: `band(length, width) | global_tokens(length, tokens)`.

    Parameters
    ----------
    length : int
        Of the sequence.
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
    who = "global_tokens"
    length, size = _count(who, "length", length), _size(who, block)
    at = np.asarray(tokens)
    if at.ndim != 1 or at.size and at.dtype.kind not in "iu":
        raise wrong(who, "tokens", "integers of 1 dimension", f"{at.dtype} of shape {at.shape}")
    check_range(f"{who}: argument 'tokens'", at, length, "positions")
    count = -(-length // size)
    chosen = np.zeros(count * size, bool)
    chosen[at.astype(np.int64)] = True
    some = np.asarray(chosen.reshape(count, size).any(1))
    row, column = np.nonzero(some[:, None] | some)
    return _made((length, length), size, row, column, lambda i, j: chosen[i] | chosen[j])


def butterfly(length: int, block: int = 64) -> BlockMask:
    """The flat block butterfly: block (i, j) where i = j, or i and j differ in one binary digit.

    Parameters
    ----------
    length : int
        Of the sequence.
    block : {16, 32, 64, 128}
        Rows and columns of a block.

    Returns
    -------
    BlockMask

    Notes
    -----
    Of n blocks each attends to about log2(n) + 1. (Dao et al., Pixelated Butterfly, 2022, section
    3.2: the sum of the factors of a block butterfly matrix, instead of their product, with the
    largest stride.) Where the number of blocks is no power of two, those beyond it are left out.
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
    """Blocks near by, blocks that attend to all and that all attend to, and random ones.

    Parameters
    ----------
    length : int
        Of the sequence.
    block : {16, 32, 64, 128}
        Rows and columns of a block.
    window : int
        Blocks side by side that each block attends to, itself in their middle; odd.
    ends : int
        Blocks at the beginning that are global: their rows and columns are all there.
    random : int
        Further blocks that each block attends to, among those that it does not yet.
    seed : int
        Of the choice of these.

    Returns
    -------
    BlockMask

    Notes
    -----
    Zaheer et al., Big Bird, 2020, section 2 and appendix D.
    """
    who = "bigbird"
    length, size = _count(who, "length", length), _size(who, block)
    window, ends = _count(who, "window", window), _count(who, "ends", ends)
    random = _count(who, "random", random)
    if window % 2 == 0:
        raise ValueError(f"{who}: argument 'window': expected an odd number, got {window}")
    rng, count = np.random.default_rng(_count(who, "seed", seed)), -(-length // size)
    rows: list[np.ndarray] = []
    for io in range(count):
        here = np.zeros(count, bool)
        here[max(0, io - window // 2) : io + window // 2 + 1] = True
        here[:ends] = True
        here |= io < ends
        others = np.flatnonzero(~here)
        here[rng.choice(others, min(random, len(others)), replace=False)] = True
        rows.append(np.flatnonzero(here))
    row = np.repeat(np.arange(count), [len(found) for found in rows])
    return _made((length, length), size, row, np.concatenate([*rows, row[:0]]), None)


def blocks(table: object, block: int = 64, shape: Sequence[int] | None = None) -> BlockMask:
    """All elements of the blocks that a table names.

    Parameters
    ----------
    table : (rows of blocks, columns of blocks) bool
        Of NumPy or torch.
    block : {16, 32, 64, 128}
        Rows and columns of a block.
    shape : (int, int), optional
        (m, n) elements; by default all blocks are whole.

    Returns
    -------
    BlockMask
    """
    size = _size("blocks", block)
    found = _table("blocks", "table", table)
    whole = (found.shape[0] * size, found.shape[1] * size)
    given = whole if shape is None else tuple(shape)
    if len(given) != 2 or tuple(-(-n // size) for n in given) != found.shape:
        raise wrong("blocks", "shape", f"(m, n) of {found.shape} blocks of {size}", given)
    row, column = np.nonzero(found)
    return _made((int(given[0]), int(given[1])), size, row, column, None)


def from_elements(
    indptr: np.ndarray, indices: np.ndarray, shape: tuple[int, int], block: int = 64
) -> BlockMask:
    """A mask of elements in CSR, in the blocks that hold one.

    Parameters
    ----------
    indptr : (m + 1,) ndarray
        Where rows begin.
    indices : (nnz,) ndarray
        Their columns, each once.
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
        For elements that are there twice, or not within the shape.
    """
    size = _size("from_elements", block)
    check_indptr("from_elements", indptr, len(indices), shape[0])
    check_range("from_elements: argument 'indices'", indices, shape[1], "integers")
    i = np.repeat(np.arange(shape[0]), np.diff(indptr))
    wide = max(1, -(-shape[1] // size))
    key = i // size * np.int64(wide) + indices // size
    found, place = np.unique(key, return_inverse=True)
    words = np.zeros((len(found), size, size // WORD), np.uint16)
    at = (place.reshape(-1), indices % size, i % size // WORD)
    np.bitwise_or.at(words, at, (1 << (i % WORD)).astype(np.uint16))
    stored = Stored.sorted(size, found // wide, found % wide, words)
    if stored.nnz != len(indices):
        raise ValueError("from_elements: argument 'indices': expected each element once")
    return stored.mask(shape)


def from_dense(mask: object, block: int = 64) -> BlockMask:
    """A mask that is stored densely, in the blocks that hold an element.

    Parameters
    ----------
    mask : (m, n) bool
        Of NumPy or torch: which queries, the rows, attend to which keys.
    block : {16, 32, 64, 128}
        Rows and columns of a block.

    Returns
    -------
    BlockMask

    Raises
    ------
    ValueError
        For what is not of booleans, such as numbers that are added to scores.
    """
    found = _table("from_dense", "mask", mask)
    rows, columns = np.nonzero(found)
    indptr = np.searchsorted(rows, np.arange(len(found) + 1))
    return from_elements(indptr, columns, (found.shape[0], found.shape[1]), block)


def _made(
    shape: tuple[int, int],
    size: int,
    row: np.ndarray,
    column: np.ndarray,
    holds: Callable[[np.ndarray, np.ndarray], np.ndarray] | None,
) -> BlockMask:
    """The mask of the elements (i, j) of some blocks for which `holds(i, j)`; None: of all."""
    at = np.arange(size)
    words = np.empty((len(row), size, size // WORD), np.uint16)
    step = max(1, CHUNK // size**2)
    for begin in range(0, len(row), step):
        here = slice(begin, begin + step)
        i = row[here, None, None] * size + at[:, None]
        j = column[here, None, None] * size + at
        inside = (i < shape[0]) & (j < shape[1])
        words[here] = packed(inside if holds is None else inside & holds(i, j))
    return Stored.sorted(size, row, column, words).mask(shape)


def _ranges(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns) of the blocks from first to last, both included, of each row."""
    counts = last - first + 1
    row = np.repeat(np.arange(len(first)), counts)
    begins = np.repeat(np.cumsum(counts) - counts, counts)
    return row, np.arange(len(row)) - begins + first[row]


# -- arguments ------------------------------------------------------------------------------------


def _count(who: str, name: str, value: Any) -> int:
    if not is_integer(value):
        raise wrong(who, name, "an integer", type(value).__name__, TypeError)
    if value < 0:
        raise ValueError(f"{who}: argument '{name}': expected 0 or more, got {value}")
    return int(value)


def _table(who: str, name: str, value: object) -> np.ndarray:
    table = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
    if table.ndim != 2 or table.dtype != bool:
        expected, got = "booleans of 2 dimensions", f"{table.dtype} of shape {table.shape}"
        raise wrong(who, name, expected, got)
    return table


def _size(who: str, value: Any) -> int:
    if not is_integer(value) or value not in BLOCKS:
        sizes = ", ".join(map(str, BLOCKS[:-1]))
        raise wrong(who, "block", f"{sizes} or {BLOCKS[-1]}", f"{value!r}")
    return int(value)
