"""How near to each other rows of B are used: of patterns whose answer is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsetir.schedules.search.choose import Statistics
from sparsetir.schedules.search.locality import STEPS, Locality

RNG = np.random.default_rng(0)
ROUNDED = 1 / STEPS


def exact(columns, rows):
    """Share of the nonzeros of the second half that a cache of so many rows misses, LRU."""
    held, misses, half = [], 0, len(columns) // 2
    for at, column in enumerate(columns.tolist()):
        if column in held:
            held.remove(column)
        elif at >= half:
            misses += 1
        held = [*held[-(rows - 1) :], column]
    return misses / (len(columns) - half)


@pytest.mark.parametrize("rows", [8, 64, 256])
@pytest.mark.parametrize("name", ["random", "band", "one column", "a cycle", "skewed"])
def test_as_a_cache_that_forgets_what_was_used_longest_ago(name, rows):
    size = 4096
    columns = {
        "random": RNG.integers(0, 300, size),
        "band": np.arange(size) // 16 + RNG.integers(0, 40, size),
        "one column": np.zeros(size, int),
        "a cycle": np.arange(size) % 100,
        "skewed": np.minimum(RNG.geometric(0.02, size), 4000),
    }[name].astype("int32")
    found = Locality.of(columns).missed(rows)
    assert abs(found - exact(columns, rows)) < ROUNDED + 0.05


def test_a_sample_of_a_large_pattern():
    large = RNG.integers(0, 50_000, 2_000_000, dtype="int32")
    assert Locality.of(large).missed(1024) > 0.9
    near = (np.arange(2_000_000) // 20 + RNG.integers(0, 50, 2_000_000)).astype("int64")
    assert Locality.of(near).missed(1024) < 0.15 < 0.8 < Locality.of(near).missed(8)
    assert Locality.of(near) == Locality.of(near) and hash(Locality.of(near))


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(0, 1 << 20))
def test_any_pattern_has_a_share(columns, rows):
    found = Locality.of(np.array(columns, "int32"))
    assert 0 <= found.missed(rows) <= 1
    assert list(found.misses) == sorted(found.misses, reverse=True)


def test_what_fits_is_not_missed():
    fits = Statistics(m=100, n=100, nnz=5000, feat=32)
    assert fits.missed(128, 1 << 20) == 0 and fits.missed(128, 1 << 10) == 1
    near = Statistics(m=100, n=100, nnz=5000, feat=32, locality=Locality((0.5, 0.25)))
    assert near.missed(128, 1 << 10) == 0.5 and near.missed(128, 1 << 11) == 0.25
    assert not Statistics(m=100, n=10**6, nnz=0, feat=32).asks_for_locality
