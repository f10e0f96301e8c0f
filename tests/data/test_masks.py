"""Masks of attention, against their definitions element by element."""

import numpy as np
import pytest
import torch

from refusals import refusals
from sparsetir import masks
from sparsetir.data.mask_blocks import BLOCKS

LENGTHS = (0, 1, 16, 100, 130)


def positions(length):
    index = np.arange(length)
    return index[:, None], index[None]


def check(mask, wanted):
    """Everything that a mask says of its elements."""
    wanted = np.asarray(wanted, bool)
    assert mask.shape == wanted.shape
    assert mask.nnz == wanted.sum()
    assert (mask.to_dense().numpy() == wanted).all()
    assert (mask.T.to_dense().numpy() == wanted.T).all()
    indptr, indices = mask.csr
    assert (indptr.numpy() == np.concatenate([[0], wanted.sum(1).cumsum()])).all()
    assert (indices.numpy() == wanted.nonzero()[1]).all()
    size, (high, wide) = mask.block, mask.grid
    padded = np.zeros((high * size, wide * size), bool)
    padded[: wanted.shape[0], : wanted.shape[1]] = wanted
    counts = padded.reshape(high, size, wide, size).sum((1, 3))
    row, column = counts.nonzero()
    rows = np.repeat(np.arange(high), np.diff(mask.rows.indptr.numpy()))
    assert (rows == row).all() and (mask.rows.indices.numpy() == column).all()
    assert (mask.full.numpy() == (counts[row, column] == size**2)).all()
    for part in (mask.rows, mask.columns):
        assert len({bytes(x.numpy()) for x in part.bits}) == len(part.bits)


@pytest.mark.parametrize("length", LENGTHS)
def test_band_and_causal(length):
    i, j = positions(length)
    for width in (0, 5, 40, 1000):
        near = abs(i - j) <= width // 2
        check(masks.band(length, width, 16), near)
        both = masks.band(length, width, 16) & masks.causal(length, 16)
        check(both, near & (j <= i))
    check(masks.causal(length, 32), j <= i)
    check(masks.causal(length, 16) | masks.band(length, 20, 16), (j <= i) | (abs(i - j) <= 10))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("tokens", [[], [0], [0, 99, 7, 7]])
def test_windows_with_global_tokens(length, tokens):
    (i, j), tokens = positions(length), [t for t in tokens if t < length]
    everywhere = np.isin(i, tokens) | np.isin(j, tokens)
    check(masks.global_tokens(length, tokens, 16), everywhere)
    both = masks.band(length, 20, 16) | masks.global_tokens(length, np.array(tokens, int), 16)
    check(both, (abs(i - j) <= 10) | everywhere)


@pytest.mark.parametrize("length", LENGTHS)
def test_butterfly(length):
    i, j = (x // 16 for x in positions(length))
    apart = i ^ j
    check(masks.butterfly(length, 16), apart & (apart - 1) == 0)


def test_bigbird():
    mask = masks.bigbird(300, 16, window=5, ends=2, random=3, seed=1)
    table = mask.to_dense()[::16, ::16].numpy()
    i, j = positions(19)
    sure = (abs(i - j) <= 2) | (i < 2) | (j < 2)
    assert table[sure].all()
    assert ((table & ~sure).sum(1)[2:] == 3).all()
    check(mask, np.kron(table, np.ones((16, 16), bool))[:300, :300])
    again = masks.bigbird(300, 16, window=5, ends=2, random=3, seed=1)
    assert (again.to_dense() == mask.to_dense()).all()
    other = masks.bigbird(300, 16, window=5, ends=2, random=3, seed=2)
    assert (other.to_dense() != mask.to_dense()).any()
    check(masks.bigbird(40, 16, random=9), np.ones((40, 40)))


def test_blocks():
    table = np.random.default_rng(0).random((3, 5)) < 0.5
    whole = np.kron(table, np.ones((32, 32), bool))
    check(masks.blocks(table, 32), whole)
    check(masks.blocks(torch.from_numpy(table), 32, (70, 129)), whole[:70, :129])
    check(masks.blocks(np.zeros((2, 2), bool), 16), np.zeros((32, 32)))


def test_from_elements():
    dense = np.random.default_rng(0).random((37, 70)) < 0.1
    indptr, indices = np.concatenate([[0], dense.sum(1).cumsum()]), dense.nonzero()[1]
    for block in BLOCKS:
        check(masks.from_elements(indptr, indices, (37, 70), block), dense)
        check(masks.from_dense(dense, block), dense)
    check(masks.from_dense(torch.from_numpy(dense.T), 16), dense.T)
    check(masks.from_dense(np.zeros((0, 5), bool)), np.zeros((0, 5)))


def test_memory_is_linear_in_the_stored_blocks():
    sizes = [masks.band(length, 256).nbytes for length in (4096, 8192, 16384)]
    assert sizes[1] - sizes[0] == pytest.approx((sizes[2] - sizes[1]) / 2)
    assert sizes[2] < 2 * (16384 // 64) * (5 * 8 + 4) + 2**12


def test_text_and_device():
    mask = masks.band(100, 10, 16)
    assert repr(mask) == "<BlockMask (100, 100), 19 blocks of 16, 1070 elements>"
    assert mask.to("meta").device.type == "meta" and mask.to("meta").nnz == mask.nnz


test_refusals = refusals(
    """
masks.band(4.5, 2)  # TypeError: band: argument 'length': expected an integer
masks.band(4, -2)  # ValueError: band: argument 'width': expected 0 or more
masks.causal(10, 24)  # ValueError: causal: argument 'block': expected 16, 32, 64
masks.causal(10, np.ones(2))  # ValueError: causal: argument 'block': expected 16, 32, 64
masks.butterfly(-1)  # ValueError: butterfly: argument 'length': expected 0 or
masks.bigbird(9, window=2)  # ValueError: 'window': expected an odd number, got 2
masks.bigbird(9, random=None)  # TypeError: 'random': expected an integer, got
masks.blocks(np.ones((2, 2)))  # ValueError: 'table': expected booleans
masks.blocks([True])  # ValueError: 'table': expected booleans of 2 dimensions
masks.blocks(np.ones((2, 2), bool), 16, (32, 33))  # ValueError: 'shape': expected .. got (32, 33)
masks.from_dense(np.ones((2, 2)))  # ValueError: from_dense: argument 'mask': expected booleans
masks.global_tokens(9, [9])  # ValueError: 'tokens': expected positions in [0, 9), got 9
masks.global_tokens(9, [0.5])  # ValueError: 'tokens': expected integers .. got float64
masks.band(32, 2, 16) & masks.band(32, 2, 32)  # ValueError: mask & mask: expected masks of one
masks.band(32, 2) | masks.band(33, 2)  # ValueError: mask | mask: expected
masks.band(32, 2) & True  # TypeError: unsupported operand
masks.from_elements(np.array([0, 2]), np.array([0, 2]), (1, 2), 16)
    # ValueError: 'indices': expected integers in [0, 2), got 2 at position 1
masks.from_elements(np.array([0, 2]), np.array([0, 1]), (3, 2), 16)
    # ValueError: 'indptr': expected shape (4,), got (2,)
masks.from_elements(np.array([0, 2]), np.array([1, 1]), (1, 2), 16)
    # ValueError: 'indices': expected each element once
""",
    globals(),
)
