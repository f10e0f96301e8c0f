"""Fixtures that leave nodes outside of regions to torch, unless a test says otherwise."""

import pytest
import torch

from compile_cache import AS_USERS
from sparsetir.graph import programs
from sparsetir.graph.rest import has_compiler
from sparsetir.runtime.pipeline import lower
from sparsetir.schedules.targets import resolve_target
from sparsetir.sparse_ir.script.parser import from_source


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


@pytest.fixture
def plain(monkeypatch):
    """Kernels as their programs say, without a schedule: it takes a tenth of the time."""

    def kernel(program, aligned):
        text, target = program.text(aligned), resolve_target({"kind": "llvm", "opt-level": 0})
        stages = lambda: lower(from_source(text), lambda sch: sch.lower(), target=target)  # noqa: E731
        return programs.compiled(("plain", text), target, stages)

    monkeypatch.setattr(programs.Program, "kernel", kernel)


@pytest.fixture
def quick_kernels(request):
    """Kernels without a schedule, unless slow tests run too, or tests compile as users do."""
    if request.config.option.markexpr == "not slow" and not AS_USERS:
        request.getfixturevalue("plain")
