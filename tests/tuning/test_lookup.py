"""The use of records in `plan`, and that none can do it harm."""

import os
import time
import warnings
from dataclasses import replace

import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir._versions import VERSIONS
from sparsetir.records.record import Key, Record
from sparsetir.records.records import Records, recorded_config
from sparsetir.records.task import Task
from sparsetir.schedules.gpu.spmm import RowSplit
from sparsetir.schedules.search.configs import to_data
from sparsetir.schedules.template import Choices

A = sparsetir.SparseMatrix(
    sp.random_array((60, 40), density=0.1, format="csr", dtype="float32", rng=0)
)
TASK = Task("spmm", A, 16, "float32", threads=1)
KEY = Key.of(TASK)
DEFAULT, *_, OTHER = sparsetir.plan_candidates("spmm", A, 16, threads=1)


def make(**options):
    return sparsetir.plan("spmm", A, 16, threads=1, **options)


def record(config, key=KEY, seconds=1.0):
    data = config if isinstance(config, dict) else to_data(config)
    return Record(key, data, seconds)


def refuse(*_, **__):
    raise AssertionError("not to be called")


def test_without_a_file_nothing_is_computed(records, monkeypatch):
    monkeypatch.setattr(Key, "of", refuse)
    monkeypatch.setattr(Records, "best", refuse)
    assert recorded_config(TASK) is None
    monkeypatch.setenv("SPARSETIR_RECORDS", "")
    assert recorded_config(TASK) is None


# For something else, or by another version.
OTHERS = [{"device": "another CPU"}, {"feat": 32}, {"threads": 2}, {"fingerprint": "0" * 32}]
GONE = [{"template": "OfTomorrow"}, {"colour": "red"}, {"tile": -3}, {"lanes": "many"}]


@pytest.mark.parametrize(
    "key, config", [*((x, OTHER) for x in OTHERS), *(({}, to_data(DEFAULT) | x) for x in GONE)]
)
def test_what_does_not_apply_is_passed_over(records, key, config):
    records.add(record(config, replace(KEY, **key)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = make()
    assert (plan.chosen_by, plan.config) == ("default", DEFAULT)


@pytest.mark.parametrize(
    "versions",
    [{}, VERSIONS | {"sparsetir": "0.0.1"}, VERSIONS | {"apache-tvm": "0.26.0"}],
    ids=["none", "sparsetir", "tvm"],
)
def test_records_of_other_versions_do_not_apply(records, versions):
    """A config that was best by another compiler may be slower than this one's default."""
    records.add(replace(record(OTHER, seconds=0.5), versions=versions))
    assert make().chosen_by == "default"
    assert records.best(KEY) is None and len(records.all()) == 1
    mine = record(DEFAULT, seconds=1.0)
    records.add(mine)
    assert make().chosen_by == "record" and records.best(KEY) == mine


@pytest.mark.parametrize(
    "config",
    [
        to_data(replace(DEFAULT, tile=16, lanes=16, feat=24)),  # for other features
        to_data(Choices()),
        to_data(RowSplit.for_features(16, "float32")),
    ],
    ids=["features", "operator", "gpu"],
)
def test_configs_that_fail_cost_a_warning(records, config):
    records.add(record(config))
    message = r"plan: the record with the config .* is not used, it failed: \w+Error: \w+"
    with pytest.warns(RuntimeWarning, match=message):
        plan = make()
    assert (plan.chosen_by, plan.config) == ("default", DEFAULT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # not again
        assert make().chosen_by == "default"


def test_a_damaged_file_costs_a_warning(records, tmp_path, monkeypatch):
    records.path.write_bytes(b"not a database" * 1000)
    with pytest.warns(RuntimeWarning, match=r"records are not used: .*records.sqlite: it is dam"):
        assert make().chosen_by == "default"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # not again
        assert make().chosen_by == "default"
        records.path.unlink()
        records.add(record(OTHER))
        assert make().chosen_by == "record"
    other = Records(tmp_path / "other.sqlite")
    other.path.mkdir()
    monkeypatch.setenv("SPARSETIR_RECORDS", str(other.path))
    with pytest.warns(RuntimeWarning, match="other.sqlite: expected a file"):
        assert make().chosen_by == "default"


def test_a_new_record_is_seen_at_once(records):
    for number, config in enumerate((OTHER, DEFAULT, OTHER)):
        records.add(record(config, seconds=1.0 - number / 4))
        assert recorded_config(TASK) == config


def test_a_file_that_rests_is_read_once(records, monkeypatch):
    records.add(record(OTHER))
    before = time.time_ns() - 10**10
    os.utime(records.path, ns=(before, before))
    assert recorded_config(TASK) == OTHER
    assert recorded_config(replace(TASK, feat=32)) is None
    with monkeypatch.context() as patched:
        patched.setattr(Records, "best", refuse)
        assert recorded_config(TASK) == OTHER
        assert recorded_config(replace(TASK, feat=32)) is None
    records.add(record(DEFAULT, seconds=0.5))
    assert recorded_config(TASK) == DEFAULT


def test_gpu_configs(records):
    target = {"kind": "cuda", "arch": "sm_90"}
    task = replace(TASK, target=target, threads=4)
    config = RowSplit.for_features(16, "float32")
    records.add(record(config, Key.of(task)))
    assert recorded_config(replace(task, threads=8)) == config
    assert recorded_config(replace(task, target={"kind": "cuda", "arch": "sm_80"})) is None
    assert recorded_config(TASK) is None
