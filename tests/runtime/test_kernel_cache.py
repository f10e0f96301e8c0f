"""Kernels kept across processes: loaded instead of compiled, and only where that is the same."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from kernel_common import linker
from programs import PROGRAMS
from sparsetir.planning import run_plan
from sparsetir.runtime import kernel_cache

pytestmark = linker


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of kernels."""
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path / "kernels"))
    kernel_cache._make_room.cache_clear()
    return tmp_path / "kernels"


@pytest.fixture
def compiled(monkeypatch):
    """The names of the kernels that are compiled."""
    names = []
    real = kernel_cache.compile_stages

    def noted(stages, target):
        names.extend(stages)
        return real(stages, target)

    monkeypatch.setattr(kernel_cache, "compile_stages", noted)
    return names


def spmv(dtype="float32"):
    return PROGRAMS["spmv"].make(dtype, "int32")


def right(kernel):
    """Compare a product with SciPy's."""
    A = sp.random(30, 20, 0.3, format="csr", dtype=kernel.signature.dtypes[0], random_state=0)
    x, y = np.arange(20, dtype=A.dtype), np.full(30, np.nan, A.dtype)
    kernel(A.data, x, y, A.indptr, A.indices)
    np.testing.assert_allclose(y, A @ x, rtol=1e-5)


def files(folder):
    return sorted(folder.glob("*.so"))


def test_a_kernel_is_compiled_once(folder, compiled):
    first = sparsetir.build(spmv())
    assert compiled == ["spmv"] and len(files(folder)) == 1
    again = sparsetir.build(spmv())
    assert compiled == ["spmv"]
    for kernel in (first, again):
        right(kernel)
    assert sparsetir.build(spmv("float64")).signature.dtypes != again.signature.dtypes
    assert compiled == ["spmv"] * 2 and len(files(folder)) == 2


def test_a_loaded_kernel_shows_what_a_compiled_one_does(folder, tmp_path, compiled):
    whole = kernel_cache.kernel_of(sparsetir.lower(spmv()), kernel_cache.host_target())
    sparsetir.build(spmv())
    loaded = sparsetir.build(spmv())
    assert loaded.needs == whole.needs and loaded.assumes == whole.assumes
    assert {n: f.script() for n, f in loaded.stages.items()} == {
        n: f.script() for n, f in whole.stages.items()
    }
    assert compiled == ["spmv"]  # stages are lowered alone
    assert loaded.source("asm") == whole.source("asm")
    loaded.export(tmp_path / "spmv.so")
    right(sparsetir.load(tmp_path / "spmv.so"))


def test_index_arrays_are_checked_as_asked(folder):
    arrays = {"a": np.ones(1, "float32"), "indptr": np.array([0, 1], "int32"),
              "indices": np.array([7], "int32"), "x": np.ones(2, "float32"),
              "y": np.zeros(1, "float32")}  # fmt: skip
    for _ in range(2):
        kernel = sparsetir.build(spmv())
        with pytest.raises(ValueError, match="indices"):
            kernel(**arrays)
    assert not sparsetir.build(spmv(), check=False).check


def test_a_plan_is_loaded_in_a_new_process(folder):
    text = """
import numpy as np, scipy.sparse as sp, sparsetir
from sparsetir.planning.run_plan import compilations
A = sp.random(50, 40, 0.2, format="csr", dtype="float32", random_state=0)
x = np.random.default_rng(0).random((40, 16)).astype("float32")
np.testing.assert_allclose(sparsetir.plan("spmm", A, 16)(x), A @ x, rtol=1e-5)
print(compilations())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    counts = [
        int(subprocess.run([sys.executable, "-c", text], env=environment, check=True, timeout=300,
                           capture_output=True, text=True).stdout.split()[-1])
        for _ in range(2)
    ]  # fmt: skip
    assert counts == [1, 0]


def test_other_choices_other_kernels(folder, compiled, monkeypatch):
    A = sp.random(20, 20, 0.3, format="csr", dtype="float32", random_state=0)
    x = np.ones((20, 32), "float32")
    configs = sparsetir.plan_candidates("spmm", A, 32)[:2]
    for _ in range(2):
        monkeypatch.setattr(run_plan, "_kernels", type(run_plan._kernels)())
        for config in configs:
            np.testing.assert_allclose(sparsetir.plan("spmm", A, 32, config=config)(x), A @ x, 1e-5)
    assert len(compiled) == len(files(folder)) == 2


@pytest.mark.parametrize("changed", ["_package", "work_of_threads", "assumed_machine"])
def test_another_package_or_machine_compiles_again(folder, compiled, monkeypatch, changed):
    sparsetir.build(spmv())
    real = getattr(kernel_cache, changed)
    values = {"_package": "another", "work_of_threads": 7}
    other = values.get(changed) or {**real(kernel_cache.host_target()), "threads": 99}
    monkeypatch.setattr(kernel_cache, changed, lambda *_: other)
    sparsetir.build(spmv())
    assert compiled == ["spmv"] * 2 and len(files(folder)) == 2


def test_files_of_the_package_count(monkeypatch, tmp_path):
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "notes.txt").write_text("1")
    monkeypatch.setattr(kernel_cache, "PACKAGE", tmp_path)
    package = kernel_cache._package.__wrapped__
    before = package()
    (tmp_path / "notes.txt").write_text("22")
    assert package() == before
    os.utime(tmp_path / "a.py", (1, 1))
    assert package() == before
    (tmp_path / "a.py").write_text("2")
    assert package() != before


def test_code_of_users_is_not_kept(folder, compiled):
    def schedule(sch):
        sch.lower()

    for _ in range(2):
        right(sparsetir.build(spmv(), schedule=schedule))
        staged = sparsetir.Schedule(spmv())
        staged.lower()
        right(sparsetir.build(staged))
        right(sparsetir.build(spmv(), {"kind": "llvm"}))
    assert not files(folder)


def test_a_schedule_that_is_changed_later(folder, compiled):
    """Stages that are lowered late are those of the schedule when it was built."""
    stages = []
    for _ in range(2):
        sch = sparsetir.Schedule(spmv())
        kernel = sparsetir.build(sch)
        visit = sch.get_sparse_iteration("spmv")
        sch.parallelize(sch.get_sp_iters(visit)[0])
        stages.append(kernel.stages["I"].script())
    assert stages[0] == stages[1] != sch.func.script()
    assert compiled == ["spmv"]


@pytest.mark.parametrize("harm", [lambda f: f.write_bytes(b""), lambda f: f.write_bytes(b"x" * 99),
                                  lambda f: f.write_bytes(f.read_bytes()[:-200])])  # fmt: skip
def test_a_damaged_file_is_written_anew(folder, compiled, harm):
    sparsetir.build(spmv())
    (file,) = files(folder)
    whole = file.read_bytes()
    harm(file)
    right(sparsetir.build(spmv()))
    assert compiled == ["spmv"] * 2 and len(file.read_bytes()) == len(whole)


def test_without_a_linker_kernels_are_in_memory(folder, compiled, monkeypatch):
    monkeypatch.setenv("PATH", "")
    for _ in range(2):
        kernel = sparsetir.build(spmv())
        right(kernel)
    assert compiled == ["spmv"] * 2 and not files(folder) and "spmv" in kernel.source("ll")


def test_a_folder_that_others_may_write_to_is_not_read(folder, compiled):
    folder.mkdir()
    folder.chmod(0o777)
    kernel_cache._is_private.cache_clear()
    for _ in range(2):
        right(sparsetir.build(spmv()))
    assert not files(folder)
    kernel_cache._is_private.cache_clear()


def test_no_folder_where_it_is_switched_off(monkeypatch, tmp_path):
    monkeypatch.setenv(kernel_cache.VARIABLE, "")
    assert kernel_cache.cache_folder() is None
    monkeypatch.delenv(kernel_cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_cache.cache_folder() == tmp_path / "sparsetir" / "kernels"


def test_the_kernels_that_were_not_used_for_longest_go(folder, monkeypatch):
    folder.mkdir(parents=True)
    for n in range(4):
        file = folder / f"{n}.so"
        file.write_bytes(bytes(100))
        os.utime(file, (n, n))
    # One process was killed while it wrote, another one is writing.
    for name, age in (("killed", 2), ("writing", 0)):
        (folder / f".sparsetir-{name}").mkdir()
        (folder / f".sparsetir-{name}" / "part.so").write_bytes(bytes(100))
        then = time.time() - age * kernel_cache.LEFT
        os.utime(folder / f".sparsetir-{name}", (then, then))
    monkeypatch.setattr(kernel_cache, "MOST_BYTES", 250)
    sparsetir.build(spmv())
    assert [x.name for x in folder.iterdir() if x.is_dir()] == [".sparsetir-writing"]
    assert {f.stem for f in files(folder)} >= {"2", "3"} and len(files(folder)) == 3
