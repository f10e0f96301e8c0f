"""What is no region runs by torch's own kernels, but where a test says otherwise."""

import pytest
import torch

from sparsetir.graph.rest import has_compiler


@pytest.fixture(autouse=True)
def reset():
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def rest(request, monkeypatch):
    name = getattr(request, "param", "eager")
    if name == "inductor" and not has_compiler():
        pytest.skip("needs a C++ compiler")
    monkeypatch.setattr("sparsetir.graph.backend.REST", name)
