"""The kernels that test processes share: the same results, and never another kernel's."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import tvm

import compile_cache
import sparsetir
from compile_cache import Cache, Kept
from kernel_common import arguments, check
from programs import PROGRAMS


class Counting:
    """`tvm.compile` without the memory that all tests have, counting."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, mod: Any, target: Any = None, **options: Any) -> Any:
        self.count += 1
        return tvm.runtime.Executable(tvm.tirx.build(mod, target))


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    real = Counting()
    monkeypatch.setattr(tvm, "compile", Cache(tmp_path / "kernels", real).compile)
    return real


def spmm(dtype: str = "float32", target: Any = "llvm") -> Any:
    return sparsetir.build(PROGRAMS["spmm"].make(dtype, "int32"), target)


def test_the_second_is_not_compiled_and_computes_the_same(compiled):
    for _ in range(2):
        args = arguments()
        kernel = spmm()
        assert isinstance(kernel._module, Kept) and compiled.count == 1
        kernel(**args)
        check(args)


def test_another_dtype_and_another_target_are_other_kernels(compiled):
    spmm(), spmm("float64"), spmm(target={"kind": "llvm", "mcpu": "x86-64"})
    assert compiled.count == 3


def test_another_version_of_tvm_compiles_anew(compiled, monkeypatch):
    spmm()
    monkeypatch.setattr(tvm, "__version__", "0")
    spmm()
    assert compiled.count == 2


def test_text_and_export_compile_once(compiled, tmp_path):
    spmm()
    kernel = spmm()
    assert compiled.count == 1
    assert "define" in kernel.source("ll") and kernel.source("asm")
    kernel.export(tmp_path / "spmm.so")
    assert compiled.count == 2
    args = arguments()
    sparsetir.load(tmp_path / "spmm.so")(**args)
    check(args)


def test_other_options_of_the_compiler_are_not_kept(compiled):
    with tvm.transform.PassContext(opt_level=1):
        assert not isinstance(spmm()._module, Kept)


def test_without_a_linker_nothing_is_kept(compiled, monkeypatch):
    monkeypatch.setattr(compile_cache, "LINKER", "no-such-linker")
    for count in (1, 2):
        args = arguments()
        spmm()(**args)
        check(args)
        assert compiled.count == count


def test_what_is_not_used_is_removed(tmp_path):
    cache = Cache(tmp_path, tvm.compile)
    cache.forget_unused()
    for name, age in (("old", 2 * compile_cache.UNUSED), ("new", 60)):
        path = tmp_path / f"{name}.so"
        path.touch()
        os.utime(path, (time.time() - age,) * 2)
    cache.forget_unused()
    assert [p.name for p in tmp_path.iterdir()] == ["new.so"]
