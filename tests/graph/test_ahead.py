"""Kernels of regions that other processes compile before they are needed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from kernel_common import linker
from sparsetir.graph import ahead
from sparsetir.machine import assume, real_machine
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
    ahead.begin([("a", "text"), ("b", text)])
    assert asked.wait(60)
    ahead.claim("a")  # which no process has begun
    waiting = threading.Thread(target=ahead.claim, args=("b",))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    go_on.set()
    waiting.join(60)
    (worker,) = ahead._workers
    worker.join(60)
    assert compiled == ["b"] and not worker.is_alive() and not waiting.is_alive()
    ahead.claim("b")
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


MODEL = """
import torch
from torch import nn
from sparsetir.graph import ahead, programs
from sparsetir.graph.operator import PROGRAMS
from sparsetir.ops import counting_sort
from sparsetir.planning.run_plan import compilations
from sparsetir.runtime.kernel_cache import is_kept

class Sum(nn.Module):
    def forward(self, x, edges):
        return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]].sigmoid())

real, ahead.LEAST = ahead.begin, 1

def begin(programs):
    real(programs)
    jobs = list(ahead._jobs.values())
    assert jobs and all(job.done.wait(120) for job in jobs)
    assert all(is_kept(job.key) for job in jobs)

ahead.begin = begin
counting_sort.kernel("int64", True)  # of edges, which belongs to no program
sorts = compilations()
x, edges = torch.rand(5, 4, requires_grad=True), torch.tensor([[0, 1, 1, 4], [2, 2, 3, 0]])
Sum()(x, edges).square().sum().backward()
eager, x.grad = x.grad, None
torch.compile(Sum(), backend="sparsetir", fullgraph=True)(x, edges).square().sum().backward()
torch.testing.assert_close(eager, x.grad)
programs.parsed = None  # a program with a kernel is not parsed again
assert [program.refusal() for program in PROGRAMS.values()] == [""] * len(PROGRAMS)
print(len(PROGRAMS), compilations() - sorts)
"""


@linker
@pytest.mark.skipif(real_machine().cores < 2, reason="one core, which compiles for itself")
def test_the_kernels_of_a_model_are_loaded(tmp_path):
    """A process compiles what another one would, by the key that it looks for."""
    paths = os.pathsep.join(sys.path)
    more = {kernel_cache.VARIABLE: str(tmp_path / "kernels"), "PYTHONPATH": paths}
    run = subprocess.run(
        [sys.executable, "-c", MODEL], env={**os.environ, **more}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    programs, compiled = map(int, run.stdout.split())
    assert programs >= 2 and compiled == 0
