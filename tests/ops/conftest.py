"""Fixtures that let each test begin as a new process does.

Nothing is kept of patterns; edges are sorted, also where others were seen before.
"""

import pytest
import torch

from sparsetir import ops
from sparsetir.ops import products


@pytest.fixture(autouse=True)
def first_patterns(monkeypatch):
    monkeypatch.setattr(products, "_sorted", -1000)
    torch.manual_seed(0)
    ops.clear_cache()
    yield
    ops.clear_cache()
    ops.limit_cache(entries=256, bytes=4 << 30)
