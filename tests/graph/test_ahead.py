"""Kernels of regions that other processes compile before they are needed."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from kernel_common import linker
from sparsetir.graph import ahead, programs
from sparsetir.graph.operator import PROGRAMS
from sparsetir.machine import assume, real_machine
from sparsetir.planning import run_plan
from sparsetir.runtime import kernel_cache
from sparsetir.tuning.process import Ended


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of kernels, and nothing to compile."""
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path / "kernels"))
    monkeypatch.setattr(ahead, "LEAST", 1)
    monkeypatch.setattr(ahead, "IDLE", 0.2)
    monkeypatch.setattr(ahead, "_jobs", {})
    monkeypatch.setattr(ahead, "_workers", [])
    with assume(real_machine()._replace(cores=2)):
        yield tmp_path / "kernels"
        for worker in ahead._workers:
            worker.join(60)


class Compiler:
    """A stand-in for the process, which compiles when it is allowed to."""

    started = 0

    def __init__(self, *_, **__):
        type(self).started += 1

    def answer(self, seconds):
        pass

    def ask(self, op, seconds, key, text):
        compiled.append(key)
        asked.set()
        assert go_on.wait(60)
        if text == "crash":
            raise Ended("crashed", "")

    def end(self):
        pass


compiled: list[str] = []
asked, go_on = threading.Event(), threading.Event()


@pytest.fixture
def stand_in(folder, monkeypatch):
    Compiler.started = 0
    compiled.clear()
    asked.clear()
    go_on.clear()
    monkeypatch.setattr(ahead, "Process", Compiler)


@pytest.mark.parametrize("text", ["text", "crash"])
def test_a_kernel_is_compiled_here_or_there(stand_in, text):
    ahead.begin([("a", text), ("b", "text")])
    assert asked.wait(60)
    ahead.claim("b")  # which no process has begun
    waiting = threading.Thread(target=ahead.claim, args=("a",))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    go_on.set()
    waiting.join(60)
    (worker,) = ahead._workers
    worker.join(60)
    assert compiled == ["a"] and not worker.is_alive() and not waiting.is_alive()
    ahead.claim("a")
    ahead.claim("unknown")


def test_no_process_for_few_kernels_or_one_core_or_without_files(stand_in, monkeypatch):
    monkeypatch.setattr(ahead, "LEAST", 3)
    ahead.begin([("a", ""), ("b", "")])
    monkeypatch.setattr(ahead, "LEAST", 1)
    with assume(real_machine()._replace(cores=1)):
        ahead.begin([("a", "")])
    monkeypatch.setenv(kernel_cache.VARIABLE, "")
    ahead.begin([("a", "")])
    assert not ahead._workers and not ahead._jobs and not Compiler.started


class Sum(nn.Module):
    def forward(self, x, edges):
        return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]].sigmoid())


@linker
def test_the_kernels_of_a_model_are_loaded(folder, monkeypatch):
    """A process compiles what this one would, by the key that it looks for."""
    seen = len(PROGRAMS)
    x = torch.rand(5, 4, requires_grad=True)
    edges = torch.tensor([[0, 1, 1, 4], [2, 2, 3, 0]])
    real = ahead.begin

    def begin(programs):
        real(programs)
        jobs = list(ahead._jobs.values())
        assert jobs and all(job.done.wait(120) for job in jobs)
        assert all(kernel_cache.is_kept(job.key) for job in jobs)

    monkeypatch.setattr(ahead, "begin", begin)
    monkeypatch.setattr(run_plan, "_kernels", type(run_plan._kernels)())
    before = run_plan.compilations()
    model = Sum()
    run = torch.compile(model, backend="sparsetir", fullgraph=True)
    run(x, edges).square().sum().backward()
    assert len(PROGRAMS) > seen and len(list(folder.glob("*.so"))) >= 2
    assert run_plan.compilations() == before and not ahead._jobs
    monkeypatch.setattr(programs, "parsed", None)  # a program with a kernel is not parsed again
    assert [program.refusal() for program in PROGRAMS[seen:]] == [""] * (len(PROGRAMS) - seen)
    ours, x.grad = x.grad, None
    model(x, edges).square().sum().backward()
    torch.testing.assert_close(ours, x.grad)
