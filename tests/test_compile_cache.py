"""Kernels that test processes share, and the pairs of parameters that run by default."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

import compile_cache
import sparsetir
from compile_cache import Cache, Kept
from pairs import covering, in_pairs
from programs import PROGRAMS


class Counting:
    """`tvm.compile` without the memory that all tests have, counting."""

    def __init__(self) -> None:
        self.count, self.instruments = 0, []  # of TVM's passes, in each call

    def __call__(self, mod: Any, target: Any = None, **options: Any) -> Any:
        self.count += 1
        instruments = tvm.transform.PassContext.current().instruments
        self.instruments.append([str(each.name) for each in instruments])
        return tvm.runtime.Executable(tvm.tirx.build(mod, target))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    kernels = Cache(tmp_path / "kernels", Counting())
    monkeypatch.setattr(tvm, "compile", kernels.compile)
    return kernels


def doubling(dtype: str = "float32", target: Any = "llvm") -> Any:
    @T.prim_func(s_tir=True)
    def double(x: T.Buffer((64,), dtype)):
        for i in range(64):
            with T.sblock("double"):
                vi = T.axis.spatial(64, i)
                x[vi] = x[vi] + x[vi]

    return sparsetir.build(double, target)


def check(kernel: Any) -> None:
    x = np.arange(64, dtype="float32")
    kernel(x)
    np.testing.assert_array_equal(x, 2 * np.arange(64))


def test_what_is_compiled_anew(cache, tmp_path, monkeypatch):
    """The first kernel of its kind, its text once and its export; never a kernel for another."""

    def made(count, *of):
        kernel = doubling(*of)
        assert isinstance(kernel._module, Kept) and cache._real.count == count
        return kernel

    made(1), check(made(1))
    made(2, "float64"), made(3, "float32", {"kind": "llvm", "mcpu": "x86-64"})
    kernel = made(3)
    text = kernel.source("asm")
    assert "define" in kernel.source("ll")
    kernel.export(tmp_path / "double.so")
    check(sparsetir.load(tmp_path / "double.so"))
    assert cache._real.count == 4
    cache.quick = True
    check(made(5)), check(made(5))
    assert made(5).source("asm") == text and cache._real.count == 6
    monkeypatch.setattr(tvm, "__version__", "0")
    made(7)


def adding(names: str = "xyi", constant: float = 1.0, bound: int = 8, index: int = 0) -> Any:
    """`y = x + constant` in a loop, as a module."""
    x = tirx.decl_buffer((8,), "float32", names[0])
    y = tirx.decl_buffer((8,), "float32", names[1])
    i = tirx.Var(names[2], "int32")
    store = tirx.BufferStore(y, x[i + index] + tirx.const(constant, "float32"), [i])
    body = tirx.For(i, 0, bound, tirx.ForKind.SERIAL, store)
    return tvm.IRModule({"main": tirx.PrimFunc([x, y], body)})


def test_a_kernel_that_computes_or_says_something_else_is_another():
    """Keys differ for everything except the names inside."""
    changes = [{"names": "zyi"}, {"constant": 1.5}, {"bound": 7}, {"index": 1}, {"names": "yxi"}]
    mods = [adding(), *(adding(**change) for change in changes)]
    assert len({compile_cache.key(mod, "llvm") for mod in mods}) == len(mods)
    assert compile_cache.key(adding("xyj"), "llvm") == compile_cache.key(mods[0], "llvm")


def test_a_kernel_with_workspaces_of_open_sizes_is_kept(cache):
    """Its options are compiled in, as is its text."""
    cache.quick = True
    for _ in range(2):
        kernel = sparsetir.build(PROGRAMS["spmm"].make("float32", "int32"))
        assert isinstance(kernel._module, Kept) and cache._real.count == 1
    assert kernel.source("asm") and cache._real.instruments == [["Without", "Without"], ["Without"]]


@pytest.mark.parametrize(
    ("sizes", "most"), [((5,), 5), ((2, 3), 6), ((5, 2, 2, 2), 12), ((7, 2, 2), 14), ((3,) * 4, 14)]
)
def test_every_pair_is_there_and_not_much_more(sizes, most):
    chosen = covering(sizes)
    for p, q in itertools.combinations(range(len(sizes)), 2):
        pairs = {(c[p], c[q]) for c in chosen}
        assert pairs == set(itertools.product(range(sizes[p]), range(sizes[q])))
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
