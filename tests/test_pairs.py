"""The combinations of parameters that tests run by default have every pair."""

import itertools

import pytest

from pairs import covering, in_pairs


@pytest.mark.parametrize(
    ("sizes", "most"), [((5,), 5), ((2, 3), 6), ((5, 2, 2, 2), 12), ((7, 2, 2), 14), ((3,) * 4, 14)]
)
def test_every_pair_is_there_and_not_much_more(sizes, most):
    chosen = covering(sizes)
    for p, q in itertools.combinations(range(len(sizes)), 2):
        found = {(c[p], c[q]) for c in chosen}
        assert found == set(itertools.product(range(sizes[p]), range(sizes[q])))
    assert {c[0] for c in chosen} == set(range(sizes[0]))
    assert len(chosen) == len(set(chosen)) <= most


def test_the_rest_of_the_product_is_slow():
    names, params = in_pairs(a=["x", "y"], b=[1, 2], c=[True, False])
    assert names == ["a", "b", "c"]
    assert [p.values for p in params] == list(itertools.product(["x", "y"], [1, 2], [True, False]))
    assert params[0].id == "x-1-True"
    fast = [p for p in params if not p.marks]
    assert 4 <= len(fast) <= 6
    assert all([m.name for m in p.marks] == ["slow"] for p in params if p not in fast)
