"""Edges sorted by a vector of nodes, and another one with them."""

import numpy as np
import pytest
import torch

from sparsetir.graph.orders import Order, arranged, order_of, range_of
from sparsetir.ops import compress
from sparsetir.ops.cache import private
from sparsetir.sparse_ir.errors import StructureIndexError


@pytest.fixture(params=[True, False], ids=["counting", "torch's sort"], autouse=True)
def counts(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(compress, "DTYPES", {})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ordered", [False, True])
def test_both_are_in_one_order(dtype, ordered):
    rows, others = (private(torch.randint(0, n, (200,)).to(dtype)) for n in (9, 50))
    if ordered:
        rows = private(rows.sort().values)
    order = order_of(rows, 12, others)
    places = np.argsort(rows.numpy(), kind="stable")
    assert (order.places is None) == ordered
    np.testing.assert_array_equal(np.arange(200) if ordered else order.places, places)
    for size in (12, 15, 9):
        starts = np.searchsorted(rows.numpy()[places], np.arange(size + 1))
        np.testing.assert_array_equal(order.starts(size), starts)
    taken, nodes = order.in_this_order(others)
    np.testing.assert_array_equal(taken, others.numpy()[places])
    assert torch.equal(taken, arranged(others, rows)) and taken.dtype == torch.int32
    assert nodes == range_of(others) == (others.min(), others.max())
    others[3] = 7  # which ends that it is known
    assert order.in_this_order(others) is None


def test_what_cannot_be_taken_along_is_not():
    rows = private(torch.tensor([3, 1, 2]))
    for other in (rows.int(), rows[:2], rows - 5, rows + 2**31, rows.clone()):
        order = Order(rows, 4, other)
        assert order.places.tolist() == [1, 2, 0] and order.in_this_order(other) is None
    with pytest.raises(StructureIndexError, match="less than 3, got 3"):
        Order(rows, 3, private(rows))


def test_what_is_prepared_goes_with_an_index():
    rows, other = (private(torch.randint(0, 9, (200,))) for _ in range(2))
    order, made = order_of(rows, 9), []

    def prepared(key, *indices):
        return order.prepared(key, indices, lambda: made.append(key) or [key])

    assert prepared(1, rows, other) is prepared(1, rows, other) and made == [1]
    assert prepared(2, rows, other) == [2] and prepared(1, rows) == [1] and made == [1, 2, 1]
    address = other.untyped_storage()._cdata
    del other
    others = [private(torch.randint(0, 9, (200,))) for _ in range(20)]
    for n, other in enumerate(others, 1):
        prepared(1, rows, other)
        assert len(made) == 3 + n, (address, other.untyped_storage()._cdata)
    del others, other
    prepared(3, rows)
    assert len(order._prepared) == 2  # of the rows alone
