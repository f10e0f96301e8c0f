"""Fingerprints and statistics of matrices, and what a search takes from records of similar ones."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import tvm

from fake_measurer import install, seconds_of
from sparsetir import SparseMatrix
from sparsetir.machine import real_machine
from sparsetir.records import task as module
from sparsetir.records.record import Key
from sparsetir.records.records import Records
from sparsetir.records.task import (
    Outcome,
    Task,
    cpu_model,
    device_name,
    fingerprint,
    shape_class,
    statistics,
)
from sparsetir.schedules.search.configs import to_data
from sparsetir.schedules.targets import resolve_target
from sparsetir.schedules.templates.row_tile import RowTile
from sparsetir.tuning.search import tune

INDPTR = np.array([0, 2, 2, 5])
INDICES = np.array([0, 3, 1, 2, 3])


def matrix(indptr=INDPTR, indices=INDICES, shape=(3, 4), idtype="int32", value=1.0):
    arrays = np.full(len(indices), value, "float32"), indices, indptr
    out = sp.csr_array(arrays, shape)
    out.indptr, out.indices = indptr.astype(idtype), indices.astype(idtype)
    return SparseMatrix(out)


def test_is_the_same_on_every_machine():
    assert fingerprint(matrix()) == "1b6b747a7624f1d28fc70c86d334cf1f"


def test_every_place_and_size_counts():
    matrices = [
        matrix(),
        matrix(indices=np.array([0, 3, 0, 2, 3])),
        matrix(indptr=np.array([0, 2, 3, 5])),
        matrix(shape=(3, 5)),
        matrix(indptr=np.array([0, 2, 2, 5, 5]), shape=(4, 4)),
        matrix(indptr=np.array([0, 2, 2, 4]), indices=INDICES[:4]),
        # Of no elements sizes are all there is.
        *(SparseMatrix(sp.csr_array(shape)) for shape in ((0, 4), (0, 5), (1, 4), (4, 0), (5, 0))),
    ]
    assert len({fingerprint(a) for a in matrices}) == len(matrices)


def test_is_computed_once_for_a_pattern_and_forgotten_with_it(monkeypatch):
    calls = []
    digest = module._digest
    monkeypatch.setattr(module, "_digest", lambda p: calls.append(p.shape) or digest(p))
    gc.collect()
    before = len(module._known)
    a = matrix()
    for each in (a, a.with_values(np.zeros(5)), a.astype("float64")):
        fingerprint(each)
    assert len(calls) == 1
    pattern = a.pattern
    assert pattern in module._known
    assert len(module._known) == before + 1
    del a, each, pattern
    gc.collect()
    assert len(module._known) == before


def test_statistics():
    stats = statistics(matrix())
    assert stats == {
        "m": 3, "n": 4, "nnz": 5, "row_mean": 5 / 3, "row_max": 3, "col_mean": 1.25, "col_max": 2,
        "row_std": pytest.approx(np.std([2, 0, 3])), "row_empty": pytest.approx(1 / 3),
        "row_q25": 1, "row_q50": 2, "row_q75": 2.5, "row_q90": pytest.approx(2.8),
        "row_q99": pytest.approx(2.98),
    }  # fmt: skip
    assert {type(x) for x in stats.values()} == {float}


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (2, 2)])
def test_statistics_of_nothing(shape):
    stats = statistics(SparseMatrix(sp.csr_array(shape)))
    assert [stats[x] for x in ("m", "n", "nnz")] == [*shape, 0]
    assert all(np.isfinite(x) for x in stats.values())
    assert stats["row_max"] == stats["col_mean"] == 0


@pytest.mark.parametrize(
    "shape, nnz, feat, want",
    [((4096, 5000), 30000, 128, "m12-n12-z15-f7"), ((1, 0), 0, 1, "m0-n0-z0-f0")],
)
def test_shape_class(shape, nnz, feat, want):
    a = sp.coo_array((np.ones(nnz), np.divmod(np.arange(nnz), max(1, shape[1]))), shape)
    assert shape_class(Task("spmm", SparseMatrix(a), feat, "float32")) == want


def test_device_names():
    here = device_name(resolve_target("llvm"))
    assert here.startswith(cpu_model()) and cpu_model()
    assert here == device_name(resolve_target({"kind": "llvm", "mcpu": "x86-64-v3"}))
    with open("/proc/cpuinfo") as file:
        text = file.read()
    assert "model name" not in text or f": {real_machine().model}\n" in text
    cuda = resolve_target({"kind": "cuda", "arch": "sm_90"})
    assert (device_name(cuda) == "sm_90") != tvm.runtime.device("cuda", 0).exist


def test_keys():
    task = Task("spmm", matrix(), np.int64(32), "float32", threads=2)
    key = Key.of(task)
    assert key == Key.of(Task("spmm", matrix(idtype="int64"), 32, "float32", threads=2))
    assert (key.feat, type(key.feat), key.threads, key.heads) == (32, int, 2, None)
    assert str(resolve_target("llvm")) == key.target
    assert key.text().startswith("spmm-float32-sum-feat32-t2-m2-n2-z2-f5-")
    assert len(key.text()) < 120
    assert Key.of(task, device="another").device == "another"
    for change in ({"heads": 1}, {"threads": 1}, {"reduce": "mean"}, {"target": {"kind": "llvm"}}):
        other = Key.of(Task(**{**task.__dict__, **change}))
        assert other != key
        assert other.text() != key.text()


def similar(seed):
    return sp.random_array((300, 200), density=0.05, format="csr", dtype="float32", rng=seed)


def run(file, seed, **options):
    options = {"trials": 8, "threads": 1, "sampler": "random", "records": file, **options}
    return tune("spmm", similar(seed), 32, **options)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "records.sqlite"


@pytest.mark.parametrize("gone", [False, True])
def test_configs_that_do_not_serve_are_left_out(monkeypatch, file, gone):
    """Records of another feature size; and of another version, with a warning."""
    install(monkeypatch)
    run(file, 1, trials=1)
    (record,) = Records(file).all()
    other = RowTile(tile=24, lanes=8, feat=24)
    config = {"template": "Gone"} if gone else to_data(other)
    Records(file).add(replace(record, id="1" * 32, seconds=1e-9, config=config))
    tuned = run(file, 2)
    assert len(tuned.trials) == 8 and other not in [trial.config for trial in tuned.trials]
    assert ["Gone" in warning for warning in tuned.warnings] == [True] * gone


def test_what_is_recorded(monkeypatch, file):
    def measure(config):
        return Outcome("ok", seconds=seconds_of(config), compile_seconds=0.5, convert_seconds=0.25,
                       padding=0.125, bytes=1000)  # fmt: skip

    install(monkeypatch, measure)
    tuned = run(file, 1, graph="a graph")
    (record,) = Records(file).all()
    assert record.key == tuned.key and record.key.fingerprint == fingerprint(tuned.task.matrix)
    assert record.config == to_data(tuned.config)
    assert record.seconds == tuned.best.outcome.seconds
    assert record.default_seconds == seconds_of(tuned.default)
    outcome = (record.compile_seconds, record.convert_seconds, record.padding, record.bytes)
    assert outcome == (0.5, 0.25, 0.125, 1000)
    assert record.statistics == statistics(tuned.task.matrix)
    assert record.trials == 8 and record.graph == "a graph"


def test_no_file_where_there_is_to_be_none(monkeypatch, tmp_path):
    install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run("", 1)
    monkeypatch.setenv("SPARSETIR_RECORDS", "")
    run(None, 1)
    assert list(tmp_path.iterdir()) == []
