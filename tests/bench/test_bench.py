"""The bench: its harness, its command line, a quick round of each command."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sparsetir
from bench import harness
from bench.__main__ import COMMANDS as COMMANDS_OF_BENCH
from bench.__main__ import parser
from bench.report import beside, circumstances, geomean, show_means, write
from bench.ways import Comparison, Device
from sparsetir.extras import WITHOUT_TORCH
from sparsetir.tuning.process import THREADS

ROOT = Path(__file__).parents[2]

COMMANDS = {
    "compile": ([], lambda r: r["spmm"]["kernel"]["min"] > 0),
    "calls": ([], lambda r: r["seconds"]["now"]["calls"]["plan, NumPy"]["min"] > 0),
    "steps": (["--feat", 128, "--plot"], lambda r: r["cells"][0]["seconds"]["plan"] > 0),
    "run": (
        ["--op", "spmm", "--graph", "cora", "--peers", "scipy", "--threads", "one", "--plot"],
        lambda r: all({"sparsetir", "scipy"} <= set(c["peers"]) for c in r["cells"]),
    ),
    "mttkrp": ([], lambda r: all(not c["wrong"] and c["seconds"]["tuned"] for c in r["cells"])),
    "attention": (
        ["--mask", "band", "--peers", "dense"],
        lambda r: set(r["cells"][0]["backward"]) == {"sparsetir", "dense"},
    ),
    "new_edges": (
        [],
        lambda r: r["seconds"]["now, 1 threads"]["new: 10000 edges"]["PyG"]["min"] > 0,
    ),
    "examples": (["--peers"], lambda r: len(r["cells"][0]["epoch"]) == 2),
    "graph": (["--peers", "PyG"], lambda r: len(r["cells"][0]["epoch"]) == 2),
    "products": ([], lambda r: {c["what"] for c in r["cells"]} == {"A @ X", "pruned"}),
    "expressions": (
        [],
        lambda r: all({"sparsetir", "scipy"} <= set(c["seconds"]) for c in r["cells"]),
    ),
    "rgcn": (["--peers", "RGCNConv"], lambda r: len(r["cells"][-1]["epoch"]) == 2),
    "sparse_conv": ([], lambda r: len(r[0]["cells"]) == 3),
    "blocks": (
        [],
        lambda r: all(
            c["times"]["sparsetir BSR"]["min"] > 0 and not c["wrong"] for c in r["cells"]
        ),
    ),
    "distributed": (
        ["--model", "sage", "--orders", 0, "--processes", 1, 2],
        lambda r: r["cells"][0]["runs"]["2"]["bytes sent / needed"] == 1,
    ),
}


def bench(*words):
    """The command with the environment that it wants; else it starts itself again."""
    without = WITHOUT_TORCH if words[0] == "mttkrp" else "pass"
    code = f"import runpy, sys; {without}; runpy.run_module('bench', run_name='__main__')"
    path = os.pathsep.join([str(Path(sparsetir.__file__).parents[1]), str(ROOT)])
    alone = words[0] in ("run", "mttkrp", "calls", "distributed")
    threads = 1 if alone else len(os.sched_getaffinity(0))
    env = {**os.environ, "PYTHONPATH": path, **dict.fromkeys(THREADS, str(threads))}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], cwd=ROOT, env=env, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def record(folder):
    (path,) = folder.glob("*.json")
    out = json.loads(path.read_text())
    assert {"date", "commit", "cpu", "threads", "versions"} <= set(out)
    assert str(ROOT) not in path.read_text()
    return out


def test_harness(tmp_path, capsys):
    """Cells in their order; a file, its picture, and an end with what was wrong."""
    args = argparse.Namespace(out=tmp_path, threads=1, plot=True)
    drawn, shown = [], []
    todo = [("a", lambda: {"name": "a"}), ("b", lambda: {"name": "b", "wrong": {"it": "no"}})]
    with pytest.raises(SystemExit, match="1 of 2 cells hold wrong results"):
        harness.run_cells(args, "thing", todo, shown.extend, drawn.append, load=3)
    with pytest.raises(SystemExit, match="1 of 1 cells"):
        harness.refuse_bad([{"missing": {"mine": "no"}}], ours="mine")
    harness.refuse_bad([{"missing": {"other": "no"}, "wrong": {}}], ours="mine")
    assert [c["name"] for c in shown] == ["a", "b"]
    (path,) = tmp_path.glob("thing-*-1t.json")
    assert drawn == [path]
    saved = record(tmp_path)
    assert [c["name"] for c in saved["results"]["cells"]] == ["a", "b"]
    assert saved["results"]["load"] == 3
    times = {"mine": {"min": 0.002}, "other": {"min": 0.01}}
    saved = beside(times, ["mine", "other", "none"], "mine")
    assert saved == ["2.00 (1.00)", "10.00 (5.00)", "-"]
    assert beside(times, ["mine"], "none") == ["2.00"]
    assert geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert harness.check("x", np.ones(2), np.ones(2), 1.0) == 0
    with pytest.raises(SystemExit, match="x is wrong by nan"):
        harness.check("x", np.array([1, np.nan]), np.ones(2), np.ones(2))


def test_tables(capsys):
    """Tables of committed files, by each command's own `show`."""
    from docs.measured import step

    from bench import attention, graph, mttkrp, sparse_conv, steps

    attention.show(step("attention")["cells"], 2)
    for cloud in step("convolutions"):
        sparse_conv.show(cloud, 1)
    mttkrp._show(step("tensors")["cells"])
    steps.show(step("steps")["cells"])
    graph.show(step("layers")["cells"])
    show_means(step("sparse 1t")["cells"], "seconds", "sparsetir", lambda c: c["op"])
    printed = capsys.readouterr().out
    expected = (
        "band ",
        "as fast as c++ registers: geometric mean",
        "SpMM by steps",
        "as fast as PyG",
        "sum of 2",
    )
    assert all(line in printed for line in expected)


def test_steps_of_readme_are_commands(tmp_path):
    """Commands with the data and without; paths of the data are not in the file."""
    from bench import readme

    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs" / "twitch_de.npz").touch()
    for data in (None, tmp_path):
        for words in readme.steps(data).values():
            parser().parse_args(shlex.split(words))
    assert str(tmp_path) in readme.steps(tmp_path)["layers"]
    with pytest.raises(SystemExit, match="--only': expected some of calls, .*, got none"):
        readme.run(parser().parse_args(["readme", "--only", "none", "--threads", "1"]))
    args = parser().parse_args(["readme", "--only", "calls", "--out", str(tmp_path)])
    args.threads = 1
    older = {**circumstances(1), "commit": "another", "quick": False}
    write(tmp_path, "readme", older, {"steps": {}})
    with pytest.raises(SystemExit, match="--only': expected readme-.* of commit .*, got another"):
        readme.run(args)


@pytest.mark.slow
def test_readme_of_some_steps(tmp_path):
    """Steps in one file; some anew."""
    common = ["readme", "--quick", "--out", tmp_path, "--only"]
    bench(*common, "products 2t", "memory")
    bench(*common, "products 2t")
    steps = record(tmp_path)["results"]["steps"]
    assert list(steps) == ["products 2t", "memory"]
    assert steps["products 2t"]["results"]["cells"][0]["seconds"]["scipy"]["min"] > 0


def test_commands_of_the_readme_are_known():
    text = (ROOT / "bench" / "README.md").read_text()
    lines = re.findall(r"^python -m bench (.*?)(?:\s+#.*)?$", text, re.MULTILINE)
    commands = {parser().parse_args(line.split()).command for line in lines}
    assert commands == set(COMMANDS_OF_BENCH)


@pytest.mark.parametrize("words, threads", [
    (["steps", "--quick"], len(os.sched_getaffinity(0))),
    (["steps", "--threads", "7"], 7),
    (["run", "--threads", "7"], 1),  # of its workers
])  # fmt: skip
def test_it_starts_itself_again_where_libraries_have_read_another_environment(
    monkeypatch, words, threads
):
    from bench.__main__ import main

    class Started(Exception):
        pass

    def start(program, command, environment):
        assert program == sys.executable
        raise Started(command[1:], {n: environment[n] for n in THREADS}, environment["PATH"])

    monkeypatch.setattr(os, "execve", start)
    monkeypatch.setenv(THREADS[-1], "99")
    with pytest.raises(Started) as started:
        main(words)
    expected = ["-m", "bench", *words], dict.fromkeys(THREADS, str(threads))
    assert started.value.args == (*expected, os.environ["PATH"])
    with pytest.raises(Started) as started:
        main(words, ("sparsetir", "bench"))
    assert started.value.args[0] == ["-m", "sparsetir", "bench", *words]


@pytest.mark.slow  # many kernels, separate processes
@pytest.mark.parametrize("command", COMMANDS)
def test_a_quick_round(command, tmp_path):
    """The command succeeds, its file has the measurements, and a picture if requested."""
    words, right = COMMANDS[command]
    bench(command, "--quick", "--out", tmp_path, *words)
    assert right(record(tmp_path)["results"])
    assert ("--plot" in words) == bool(list(tmp_path.glob("*.png")))


def test_a_file_that_is_no_graph_ends_with_one_line(tmp_path, monkeypatch):
    from bench.__main__ import main

    for name in THREADS:
        monkeypatch.setenv(name, "1")  # else it starts itself again
    with pytest.raises(SystemExit) as end:
        main(["steps", "--threads", "1", "--graph", str(tmp_path / "x.txt")])
    message = str(end.value.code)  # which Python prints, and ends with status 1
    assert message.startswith(f"python -m bench steps: {tmp_path}/x.txt: no such file")
    assert "\n" not in message


def test_rules_are_the_masks():
    import torch

    from bench import attention

    position = torch.arange(600)
    for name, make in attention.MASKS.items():
        mask = make(600)
        held = attention.rule(name, mask)(0, 0, position[:, None], position[None])
        assert torch.equal(held, mask.to_dense())


def test_ways_that_are_wrong_or_missing_are_not_timed():
    """Results and gradients; what writes nothing leaves NaN; parameters of modules count."""
    import torch

    x, grad = torch.randn(2, 4, 3)
    layer = torch.nn.Linear(3, 3)

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return layer(x).detach()

        @staticmethod
        def backward(ctx, *grads):
            return grads[0] * 2

    def refuse():
        raise ValueError("no such thing\nat all")

    ways = {
        "right": lambda: layer,
        "off": lambda: lambda x: layer(x) + 1e-2,
        "nan": lambda: lambda x: layer(x) * torch.nan,
        "absent": refuse,
        "inferring": lambda: lambda x: layer(x).detach(),
        "bad gradients": lambda: Off.apply,
    }
    device = Device(seconds=0.0, least=2)
    times = Comparison([[x]], layer, grads=[grad]).measure(ways, device)
    assert set(times["forward"]) == {"right", "inferring", "bad gradients"}
    assert set(times["backward"]) == {"right"}
    assert set(times["wrong"]) == {"off", "nan", "gradients of bad gradients"}
    assert set(times["no_gradient"]) == {"inferring"}
    assert times["missing"]["absent"].endswith("no such thing")
    out = torch.zeros(4, 3)
    writing = Comparison([[x, out]], lambda x, out: layer(x), written=1)
    copies = {
        "writes": lambda: lambda x, out: out.copy_(layer(x)),
        "nothing": lambda: lambda x, out: out,
    }
    times = writing.measure(copies, device)
    assert set(times["forward"]) == {"writes"} and set(times["wrong"]) == {"nothing"}


def test_turns_of_checkouts_are_merged():
    from bench.checkouts import merge

    merged = {}
    merge(merged, {"g": {"a": {"min": 2.0, "median": 5.0, "rounds": 3}}})
    merge(merged, {"g": {"a": {"min": 3.0, "median": 4.0, "rounds": 4}}})
    assert merged == {"g": {"a": {"min": 2.0, "median": 4.0, "rounds": 7}}}
