"""The examples run, in small, and say what they should."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fake_measurer import install
from sparsetir.data.datasets import load_cora, load_cora_dataset
from sparsetir.records.task import Outcome

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example as a program, and gives what it prints."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(EXAMPLES)

    def program(example, *arguments):
        monkeypatch.setattr(sys, "argv", [example, *arguments])
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
        return capsys.readouterr().out

    yield program
    torch.set_num_threads(threads)


def test_data_of_cora():
    data = load_cora_dataset()
    assert (data.graph != load_cora()).nnz == 0
    assert data.features.shape == (2708, 1433) and data.features.nnz == 49216
    assert data.features.has_canonical_format and set(data.features.data) == {1}
    assert np.bincount(data.labels).tolist() == [351, 217, 418, 818, 426, 298, 180]
    masks = np.stack([data.train, data.val, data.test])
    assert masks.sum(1).tolist() == [140, 500, 1000]
    assert masks.sum(0).max() == 1
    assert np.bincount(data.labels[data.train]).tolist() == [20] * 7


@pytest.mark.parametrize(
    "example, epochs, least", [("gcn", 60, 70), ("sage", 50, 68), ("gat", 25, 70)]
)
@pytest.mark.default("gcn-60-70")
def test_cora(run, example, epochs, least):
    text = run(f"{example}_cora.py", "--seeds", "1", "--epochs", str(epochs))
    assert "seed 0: test accuracy " in text
    (mean,) = re.findall(r"^test accuracy of 1 runs: ([\d.]+) ± 0.0 %$", text, re.MULTILINE)
    assert float(mean) > least


@pytest.mark.slow
@pytest.mark.parametrize("example, least", [("gcn", 80.5), ("sage", 79.5), ("gat", 81)])
def test_accuracy_of_the_literature(run, example, least):
    text = run(f"{example}_cora.py")
    (mean,) = re.findall(r"^test accuracy of 10 runs: ([\d.]+) ±", text, re.MULTILINE)
    assert float(mean) > least


@pytest.mark.parametrize("gains", [True, False])
@pytest.mark.default("False")
def test_demo(run, monkeypatch, gains):
    """Measurements are pretended: schedules are twice as fast as the default, or none is."""
    seconds = 1e-3 if gains else 2e-3
    install(monkeypatch, lambda config: Outcome("ok", seconds=seconds if config else 2e-3))
    text = run("demo.py", "--size", "64", "--features", "8", "--trials", "2")
    assert len(text.splitlines()) <= 90
    parts = [
        "10,556 links", "Largest difference from scipy's result: ", "with T.sp_iter([I, A1, K]",
        "a reduction: visits that differ in j", "tiles of 8 in registers",
        "a dense product of as many flops takes ", "2 schedules of ",
    ]  # fmt: skip
    assert [part for part in parts if part not in text] == []
    assert (" features in registers\n" in text) == gains
    assert ("none was 2 % faster than the default" in text) != gains
    names = ["sparsetir", "scipy", "torch", "default", *(["tuned"] if gains else [])]
    for name in names:
        line = rf"^  {name} +[\d.,]+ [µm]s  +\d+ threads?  +[\d.]+ x$"
        assert re.search(line, text, re.MULTILINE), name


@pytest.mark.slow  # its layer is tested in nn/
def test_rgcn(run):
    text = run("rgcn.py", "--seeds", "1", "--epochs", "25")
    (mean,) = re.findall(r"^test accuracy of 1 runs: ([\d.]+) ±", text, re.MULTILINE)
    assert float(mean) > 80


def test_rgcn_of_a_file(run, tmp_path):
    random = np.random.default_rng(0)
    src, dst = random.integers(40, size=(2, 200))
    arrays = {"num_nodes": 40, "src": src, "dst": dst, "etype": random.integers(3, size=200)}
    np.savez(tmp_path / "graph.npz", **arrays)
    text = run("rgcn.py", "--data", str(tmp_path / "graph.npz"), "--seeds", "1", "--epochs", "2")
    assert "test accuracy of 1 runs" in text


def test_rgcn_of_labels_and_of_groups(tmp_path):
    """Labels and a split from a file; in AIFB without labels the group that published most."""
    module = runpy.run_path(str(EXAMPLES / "rgcn.py"))
    arrays = {
        "num_nodes": 7,
        "src": [0, 0, 1, 2, 3, 4],
        "dst": [2, 3, 4, 5, 5, 5],
        "etype": [0] * 6,
    }
    labels = {"labels": [0, 1, -1, 0, 1, 0, 1], "train": [0, 1], "test": [3]}
    np.savez(tmp_path / "a.npz", **arrays, **labels)
    data = module["load"](str(tmp_path / "a.npz"))
    assert data.labels.tolist() == labels["labels"]
    assert [x.tolist() for x in data.split] == [[0, 1], [3]]
    names = ["Forschungsgruppen", "Publikationen", "Personen"]
    arrays |= {"etype": [0, 0, 0, 1, 1, 1], "etype_names": ["publishes", "author"]}
    arrays |= {"node_type": [0, 0, 1, 1, 1, 2, 2], "ntype_names": names}
    np.savez(tmp_path / "b.npz", **arrays)
    data = module["load"](str(tmp_path / "b.npz"))  # two of three by group 0; one person wrote none
    assert data.labels.tolist() == [-1, -1, -1, -1, -1, 0, -1] and data.split is None


@pytest.mark.slow  # many kernels, which test_thesis.py checks too
def test_thesis_schedules(run):
    text = run("thesis_schedules.py", "--scale", "0.01", "--seconds", "0")
    names = ["A.1", "A.3", "A.5", "A.6", "A.7", "A.12", "A.13", "tuned 3", "tuned 4", "tuned 5"]
    for name in names:
        assert re.search(rf"^{re.escape(name)} +\w+ +[\d.]+ +[\d.]+ +[\d.]+$", text, re.MULTILINE)


def test_pruned_encoder(run, tmp_path):
    text = run(
        "pruned_encoder.py", "--layers", "1", "--hidden", "64", "--intermediate", "96", "--heads",
        "2", "--batch", "1", "--length", "12", "--rounds", "1", "--json", str(tmp_path),
    )  # fmt: skip
    assert "blocks of 32, 90%: 6 linear layers" in text
    (path,) = tmp_path.glob("encoder-*.json")
    written = json.loads(path.read_text())
    assert {"cpu", "threads", "versions", "sizes"} < set(written)
    results = {(r["model"], r["dtype"]): r for r in written["results"]}
    assert len(results) == 6
    for (_, dtype), record in results.items():
        assert 0 < record["seconds"] and record["difference"] < {"float32": 1e-5}.get(dtype, 0.1)
    dense, blocks = (results[name, "float32"]["bytes"] for name in ("dense", "blocks of 32, 90%"))
    assert blocks < dense / 4


def test_an_encoder_with_weights_of_a_file(run, tmp_path):
    sizes = {"layers": 1, "hidden": 8, "intermediate": 16, "heads": 2}
    encoder = runpy.run_path(str(EXAMPLES / "pruned_encoder.py"))["Encoder"](**sizes)
    state = {f"bert.encoder.{name}": x for name, x in encoder.state_dict().items()}
    assert "bert.encoder.layer.0.attention.self.query.weight" in state
    torch.save({**state, "bert.pooler.dense.bias": torch.ones(2)}, tmp_path / "bert.pt")
    options = [f"--{name}={value}" for name, value in sizes.items()]
    text = run(
        "pruned_encoder.py", *options, "--block=4", "--length=3", "--rounds=1", "--dtypes",
        "float32", "--state", str(tmp_path / "bert.pt"),
    )  # fmt: skip
    assert "one by one, 95%" in text


def test_sparse_unet_of_a_file(run, tmp_path):
    points = np.random.default_rng(0).uniform(0, 1, (500, 4)).astype(np.float32)
    np.savez(tmp_path / "cloud.npz", points=points)
    text = run(
        "sparse_unet.py", "--data", str(tmp_path / "cloud.npz"), "--voxel", "0.1", "--channels",
        "8", "8", "--steps", "2", "--every", "1",
    )  # fmt: skip
    assert "2 classes" in text and re.search(r"^step 1: loss [\d.]+, accuracy", text, re.MULTILINE)
    assert "accuracy on the file: " in text


@pytest.mark.slow  # processes
def test_sage_distributed():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, EXAMPLES / "sage_distributed.py"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "here 1358 nodes, 5258 edges, 1102 nodes of others>" in done.stdout
    (accuracy,) = re.findall(r"^test accuracy ([\d.]+)%$", done.stdout, re.MULTILINE)
    assert float(accuracy) > 75


@pytest.mark.slow  # several seconds of training
def test_sparse_unet(run):
    text = run("sparse_unet.py", "--steps", "25", "--points", "4000", "--batches", "4")
    (accuracy,) = re.findall(r"^accuracy on new clouds: ([\d.]+) %$", text, re.MULTILINE)
    assert float(accuracy) > 85


@pytest.mark.slow  # many processes
def test_epoch_time(run, tmp_path):
    pytest.importorskip("torch_geometric")
    graph = load_cora()[:300, :300].tocsr()
    path, out = tmp_path / "small.npz", tmp_path / "times.json"
    np.savez(path, shape=graph.shape, indptr=graph.indptr, indices=graph.indices)
    text = run(
        "epoch_time.py", "--graphs", str(path), "--models", "sage", "--hidden", "8", "--threads",
        "1", "--rounds", "2", "--epochs", "1", "--json", str(out),
    )  # fmt: skip
    written = json.loads(out.read_text())
    assert {"date", "commit", "cpu", "threads", "versions"} < set(written)
    (cell,) = written["results"]
    assert cell["graph"] == "small"
    assert set(cell["peers"]) == {"sparsetir", "pyg edges", "pyg adj_t"}
    for name, peer in cell["peers"].items():
        assert re.search(rf"^  {name} +[\d.]+ ms", text, re.MULTILINE)
        assert 0 < peer["min"] <= peer["median"]
        # The same model from the same seed on the same data.
        np.testing.assert_allclose(peer["losses"], cell["peers"]["sparsetir"]["losses"], rtol=1e-3)


def test_cora_as_it_ships():
    graph = load_cora()
    assert graph.shape == (2708, 2708)
    assert graph.nnz == 10556
    assert graph.dtype == np.float32
    assert graph.indices.dtype == graph.indptr.dtype == np.int32
    assert graph.has_canonical_format
    assert (graph != graph.T).nnz == 0
