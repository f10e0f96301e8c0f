"""Each test begins as a new process does: edges are sorted, as long as not many were new."""

import pytest

from sparsetir.ops import new_edges


@pytest.fixture(autouse=True)
def first_patterns(monkeypatch):
    monkeypatch.setattr(new_edges, "_sorted", 0)
