"""Kernels of a process: each is compiled once, so many are kept, and none keeps others waiting."""

import threading
from collections import OrderedDict

import pytest

import sparsetir
from sparsetir.ops.tensors import kernel_by
from sparsetir.planning import run_plan
from sparsetir.runtime import kernel_cache
from sparsetir.schedules.operators.block_linear import BlockLinear
from sparsetir.schedules.targets import resolve_target
from sparsetir.schedules.templates.block_linear import BlockTile


@pytest.fixture
def made(monkeypatch):
    """The kernels that were compiled; a kernel is its stages here."""
    kernels = []
    monkeypatch.setattr(run_plan, "_kernels", OrderedDict())
    monkeypatch.setattr(
        kernel_cache, "kernel_of", lambda stages, *_, **__: kernels.append(stages) or stages
    )
    return kernels


def wanted(key):
    return run_plan.compiled(key, "llvm", lambda: key)


def test_what_was_not_wanted_for_longest_goes(made, monkeypatch):
    monkeypatch.setattr(run_plan, "MOST_KERNELS", 2)
    before = sparsetir.compilations()
    for key in "abab":
        assert wanted(key) == key
    wanted("a")
    wanted("c")
    wanted("a")
    assert made == ["a", "b", "c"]
    wanted("b")
    assert made == ["a", "b", "c", "b"] and sparsetir.compilations() == before + 4


def test_operators_keep_no_kernels_of_their_own(made, monkeypatch):
    monkeypatch.setattr(run_plan, "MOST_KERNELS", 1)
    monkeypatch.setattr(run_plan, "lower_template", lambda *args: args[1])
    config, target = BlockTile(lanes=8), resolve_target("llvm")
    chosen = []

    def choose(*args):
        chosen.append(args)
        return config

    for rows in (8, 8, 16, 8):
        kernel_by(choose, BlockLinear(rows, 8), target)
    assert [problem.rows for problem in made] == [8, 16, 8] and len(chosen) == 2


def test_what_is_there_is_not_waited_for(made):
    wanted("there")
    begun, go_on = threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go_on.wait(60)
        return "slow"

    threads = [
        threading.Thread(target=run_plan.compiled, args=("slow", "llvm", slow)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    other = threading.Thread(target=wanted, args=("there",), daemon=True)
    other.start()
    other.join(30)
    waited = other.is_alive()
    go_on.set()
    for thread in (*threads, other):
        thread.join(60)
    assert not waited and made == ["there", "slow"]
