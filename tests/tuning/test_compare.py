"""Configs beside the libraries: all are checked, named and timed; what is missing is said."""

import json

import numpy as np
import pytest
import scipy.sparse as sp

import tuned_fake
from sparsetir.formats import Hyb
from sparsetir.measuring import peers
from sparsetir.measuring.case import Reference, make
from sparsetir.schedules.templates.decomposed import Decomposed
from sparsetir.schedules.templates.spmm import RowBlocks
from sparsetir.tuning import compare as module
from sparsetir.tuning.compare import Comparison, Times, compare, finalists, ranked
from sparsetir.tuning.tuned import Trial

SMALL = RowBlocks(tile=16, lanes=16)


def test_configs_and_libraries(monkeypatch):
    monkeypatch.setattr(module, "LIBRARIES", ("scipy", "yardstick"))
    configs = {"default": SMALL, "best 1": Decomposed(Hyb(1, 3)), "best 2": SMALL}
    found = compare(tuned_fake.task(), configs, rounds=2, seconds=0.001)
    assert list(found.configs) == ["default", "best 1", "best 2"] and list(found.libraries) == [
        "scipy"
    ]
    assert found.configs["default"] == found.configs["best 2"] != found.configs["best 1"]
    for times in (*found.configs.values(), *found.libraries.values()):
        assert 0 < times.seconds <= times.median < 1
    assert found.libraries["scipy"].way == "product" and found.vendor == "scipy"
    assert list(found.missing) == ["yardstick"] and "does not compile" in found.missing["yardstick"]
    assert not found.wrong and not found.failed
    data = json.loads(json.dumps(found.data()))
    assert data["configs"]["best 1"]["seconds"] == found.configs["best 1"].seconds
    assert data["vendor"] == "scipy"


@pytest.mark.slow  # the test above has a library that is missing, the last one has all reasons
def test_what_a_library_does_not_have(monkeypatch):
    monkeypatch.setattr(module, "LIBRARIES", ("scipy",))
    found = compare(tuned_fake.task(reduce="mean", heads=2), {"one": SMALL}, 1, 0.001)
    assert set(found.configs) == {"one"} and not found.wrong and found.vendor is None
    assert found.missing == {"scipy": "has no mean of rows"}


class Pretender:
    """In place of a process: its results are wrong for the configs named so."""

    def __init__(self, name, threads, options):
        self.name, self.threads, self.options = name, threads, options

    def start(self):
        pass

    def ask(self, op, folder="", case=None, **request):
        if op != "prepare":
            return {"times": [2000, 3000], "switches": 0}
        with open(self.options["plans"]) as file:
            names = list(json.load(file)["configs"])
        shape = (case["shape"][0], case["feat"])
        for name in names:
            np.save(f"{folder}/result-{name}.npy", np.full(shape, np.nan, "float32"))
        return {"variants": names, "about": {}, "refused": {}}

    def close(self):
        pass


def test_what_is_wrong_has_no_times(monkeypatch):
    monkeypatch.setattr(module, "LIBRARIES", ())
    monkeypatch.setattr(module.turns, "Worker", Pretender)
    found = compare(tuned_fake.task(), {"default": SMALL, "best 1": RowBlocks()})
    assert not found.configs and found.wrong["sparsetir"].startswith("default: ")
    assert "; best 1: " in found.wrong["sparsetir"]


def test_a_config_that_cannot_be_planned_is_said(monkeypatch):
    monkeypatch.setattr(module, "LIBRARIES", ())
    found = compare(tuned_fake.task(feat=24), {"default": RowBlocks(tile=16)}, 1, 0.001)
    assert not found.configs and "16" in found.failed["sparsetir"]


def test_names_are_names_of_files():
    with pytest.raises(ValueError, match="expected names without '/', got a/b"):
        compare(tuned_fake.task(), {"a/b": SMALL})


def test_without_a_gpu_its_libraries_are_missing():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    task = tuned_fake.task(target={"kind": "cuda", "arch": "sm_90"})
    found = compare(task, {"default": SMALL})
    assert found == Comparison(
        missing={"cusparse": "torch finds no CUDA device", "torch": "torch finds no CUDA device"}
    )


def test_vendor():
    assert Comparison().vendor is None
    two = {"scipy": Times(2.0, 2.0), "mkl": Times(1.0, 3.0)}
    assert Comparison(libraries=two).vendor == "mkl"


def test_finalists():
    tuned = tuned_fake.tuned()
    best = ranked(tuned)
    assert [t.number for t in best] == [6, 7, 5, 1, 8, 0, 4, 2, 3]
    found = finalists(tuned, 3)
    assert list(found) == ["default", "best 1", "best 2", "best 3"]
    assert found["default"] == tuned.default and found["best 2"] == best[1].config
    again = [Trial(8, tuned.trials[8].config, tuned_fake.outcome(1.0), 1.0)]
    assert ranked(tuned_fake.tuned(finals=again))[0] is again[0]
    assert finalists(tuned_fake.tuned([])) == {"default": tuned.default}


@pytest.mark.parametrize("op", ["spmm", "spmv", "sddmm"])
@pytest.mark.parametrize("library", ["scipy", "torch", "mkl"])
@pytest.mark.parametrize(
    "dtype, reduce, heads",
    [("float64", "sum", None), ("float32", "mean", None), ("float32", "max", None),
     ("float32", "sum", 2)],
)  # fmt: skip
def test_libraries_are_right_or_missing(library, op, dtype, reduce, heads):
    if op == "sddmm" and reduce != "sum":
        pytest.skip("sums alone")
    matrix = sp.random_array((30, 40), density=0.1, format="csr", dtype=dtype, rng=0)
    matrix = sp.csr_array((matrix.data - 0.5, *(x.astype("int32") for x in (
        matrix.indices, matrix.indptr))), shape=matrix.shape)  # fmt: skip
    case = make(op, matrix, 16, dtype, reduce, heads)
    reference = Reference(case)
    try:
        peer = peers.PEERS[library](1, {})
    except (ImportError, peers.Missing) as error:
        pytest.skip(str(error))
    try:
        calls = peer.prepare(case)
    except peers.Missing as error:
        expected = {"heads": heads is not None, reduce: reduce != "sum", "SDDMM": op == "sddmm"}
        assert any(word in str(error) for word, fits in expected.items() if fits)
        return
    assert heads is None and (reduce == "sum" or library == "torch" and op == "spmm")
    for name, call in calls.items():
        assert reference.error(peer.to_numpy(call())) is None, name
    peer.release()
