"""Attention masks in blocks, and their storage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Sizes of blocks that kernels support; bits of a word.
BLOCKS, WORD = (16, 32, 64, 128), 16


class BlockRows(NamedTuple):
    """The stored blocks by block rows (of a transposed mask: by block columns).

    indptr : (block rows + 1,) int32
    indices : (blocks,) int32 block columns, increasing in each row
    kinds : (blocks,) int32 index of each block into `bits`; 0 for those with all elements
    bits : (kinds, block, block / 16) int16: bit i % 16 of [kind, j, i // 16] is set if (i, j) of
        such a block is an element, where i counts rows and j columns
    """

    indptr: Tensor
    indices: Tensor
    kinds: Tensor
    bits: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """A mask of (m, n) elements, stored by blocks; made by the functions of :mod:`sparsetir.masks`.

    `a & b` is the intersection of masks, `a | b` the union.

    Parameters
    ----------
    shape : (int, int)
        m queries and n keys; the last blocks may exceed them.
    block : {16, 32, 64, 128}
        Rows and columns of a block.
    rows, columns : BlockRows
        The stored blocks, and those of the transposed mask.
    nnz : int
        Number of elements.

    Notes
    -----
    Blocks with the same elements share their bits, so that memory is linear in the stored blocks: 8
    bytes per block, and block**2 / 8 per kind, twice.
    """

    shape: tuple[int, int]
    block: int
    rows: BlockRows
    columns: BlockRows
    nnz: int

    @property
    def device(self) -> torch.device:
        """The device of the arrays."""
        return self.rows.indices.device

    @property
    def full(self) -> Tensor:
        """Whether each block has all elements, (blocks,) bool."""
        return self.rows.kinds == 0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.numel() * x.element_size() for x in (*self.rows, *self.columns))

    @property
    def T(self) -> BlockMask:
        """The transposed mask."""
        m, n = self.shape
        return BlockMask((n, m), self.block, self.columns, self.rows, self.nnz)

    def to(self, device: torch.device | str) -> BlockMask:
        """Copy the mask to another device.

        Parameters
        ----------
        device : torch.device or str
            The device of the result's arrays.

        Returns
        -------
        BlockMask
        """
        rows, columns = (BlockRows(*(x.to(device) for x in a)) for a in (self.rows, self.columns))
        return BlockMask(self.shape, self.block, rows, columns, self.nnz)

    def to_dense(self) -> Tensor:
        """The mask as a dense (m, n) bool tensor."""
        stored, (high, wide), size = Stored.of(self), self.grid, self.block
        out = np.zeros((high, wide, size, size), bool)
        out[stored.row, stored.column] = stored.elements()
        out = out.transpose(0, 2, 1, 3).reshape(high * size, wide * size)
        return torch.from_numpy(out[: self.shape[0], : self.shape[1]].copy()).to(self.device)

    @cached_property
    def csr(self) -> tuple[Tensor, Tensor]:
        """CSR row pointers (m + 1,) and increasing columns (nnz,), int64; cached."""
        stored, size = Stored.of(self), self.block
        place, row, column = np.nonzero(stored.elements())
        row += stored.row[place] * size
        column += stored.column[place] * size
        order = np.argsort(row * np.int64(self.shape[1]) + column)
        indptr = np.searchsorted(row[order], np.arange(self.shape[0] + 1))
        begins, columns = (torch.from_numpy(x).to(self.device) for x in (indptr, column[order]))
        return begins, columns

    @property
    def grid(self) -> tuple[int, int]:
        """The numbers of block rows and block columns."""
        m, n = self.shape
        return -(-m // self.block), -(-n // self.block)

    def __and__(self, other: object) -> BlockMask:
        return _combined(self, other, "&") if isinstance(other, BlockMask) else NotImplemented

    def __or__(self, other: object) -> BlockMask:
        return _combined(self, other, "|") if isinstance(other, BlockMask) else NotImplemented

    def __repr__(self) -> str:
        return (
            f"<BlockMask {self.shape}, {len(self.rows.indices)} blocks of "
            f"{self.block}, {self.nnz} elements>"
        )


# -- blocks and their bits ------------------------------------------------------------------------


class Stored(NamedTuple):
    """The stored blocks of a mask, sorted by rows: (blocks,) rows and columns, and their bits.

    words : (kinds, size, size / 16) uint16; block b has `words[kinds[b]]`
    """

    size: int
    row: np.ndarray
    column: np.ndarray
    kinds: np.ndarray
    words: np.ndarray

    @staticmethod
    def sorted(size: int, row: np.ndarray, column: np.ndarray, words: np.ndarray) -> Stored:
        """Sort blocks with one array of words each; drop those without elements."""
        some = words.any(axis=(1, 2))
        row, column, words = row[some], column[some], words[some]
        ones = np.full((1, *words.shape[1:]), -1 % (1 << WORD), np.uint16)
        number = {ones.tobytes(): 0}
        kinds = [number.setdefault(one.tobytes(), len(number)) for one in words]
        stacked = np.frombuffer(b"".join(number), np.uint16).reshape(-1, *words.shape[1:])
        order = np.lexsort((column, row))
        return Stored(size, row[order], column[order], np.array(kinds, np.intp)[order], stacked)

    @staticmethod
    def of(mask: BlockMask) -> Stored:
        """The blocks of a mask."""
        indptr, indices, kinds, bits = (x.cpu().numpy() for x in mask.rows)
        row = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        return Stored(mask.block, row, indices.astype(np.intp), kinds, bits.view(np.uint16))

    @property
    def nnz(self) -> int:
        """The number of elements of all blocks."""
        counts = np.unpackbits(self.words.view(np.uint8), axis=-1).sum(axis=(1, 2))
        return int(counts[self.kinds].sum())

    def elements(self) -> np.ndarray:
        """The elements of each block, (blocks, size, size) bool."""
        return _unpacked(self.words)[self.kinds]

    def mask(self, shape: tuple[int, int]) -> BlockMask:
        """The mask of these blocks."""
        size, grid = self.size, [-(-n // self.size) for n in shape]
        order = np.lexsort((self.row, self.column))
        turned = packed(_unpacked(self.words).transpose(0, 2, 1))
        by_row = _rows(self.row, self.column, self.kinds, self.words, grid[0])
        by_column = _rows(self.column[order], self.row[order], self.kinds[order], turned, grid[1])
        return BlockMask((int(shape[0]), int(shape[1])), size, by_row, by_column, self.nnz)


def _rows(
    row: np.ndarray, column: np.ndarray, kinds: np.ndarray, words: np.ndarray, count: int
) -> BlockRows:
    indptr = np.searchsorted(row, np.arange(count + 1))
    arrays = (np.array(x, np.int32) for x in (indptr, column, kinds))
    return BlockRows(*map(torch.from_numpy, (*arrays, np.array(words).view(np.int16))))


def packed(elements: np.ndarray) -> np.ndarray:
    """Pack (n, size, size) elements by columns into (n, size, size / 16) words."""
    bits = np.packbits(elements.transpose(0, 2, 1), axis=-1, bitorder="little")
    return np.ascontiguousarray(bits).view("<u2").astype(np.uint16, copy=False)


def _unpacked(words: np.ndarray) -> np.ndarray:
    """Unpack (n, size, size / 16) words into (n, size, size) elements."""
    octets = np.ascontiguousarray(words.astype("<u2", copy=False)).view(np.uint8)
    return np.unpackbits(octets, axis=-1, bitorder="little").astype(bool).transpose(0, 2, 1)


def _combined(a: BlockMask, b: BlockMask, sign: str) -> BlockMask:
    if a.shape != b.shape or a.block != b.block:
        raise ValueError(
            f"mask {sign} mask: expected masks of one shape and block size, got {a.shape} in "
            f"blocks of {a.block} and {b.shape} in blocks of {b.block}"
        )
    wide = max(1, a.grid[1])
    both = [Stored.of(mask) for mask in (a, b)]
    keys = [stored.row * np.int64(wide) + stored.column for stored in both]
    meet = np.intersect1d if sign == "&" else np.union1d
    blocks: np.ndarray = meet(keys[0], keys[1])
    words = []
    for stored, key in zip(both, keys, strict=True):
        words_of = np.zeros((len(blocks), *stored.words.shape[1:]), np.uint16)
        _, here, places = np.intersect1d(blocks, key, return_indices=True)
        words_of[here] = stored.words[stored.kinds[places]]
        words.append(words_of)
    together = words[0] & words[1] if sign == "&" else words[0] | words[1]
    result = Stored.sorted(a.block, blocks // wide, blocks % wide, together).mask(a.shape)
    return result if a.device.type == "cpu" else result.to(a.device)
