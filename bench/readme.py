"""All figures of the README and the pages: one run, one file, one commit.

Each step is a command in a separate process, with the threads that it names; its file becomes a
part of one. `python -m docs.speed` writes tables and pictures from that.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu_day import Step, outcome
from bench.harness import chosen
from bench.report import ROOT, circumstances, path_of, table, write
from bench.timing import progress

LONGEST = 900  # limit of a step in seconds
SHIM = ROOT / "bench" / "peers" / "mkl_as_intel.c"
FORCED = "mkl avx512"
# Matrices of sparse products, below `matrices/` of the data.
MATRICES = "bcsstk16 cage10 circuit_basker1 groebner_id2003_aug navier_stokes_nsjac p2p-gnutella31"
SHARED = ("commit", "cpu", "llvm_cpu", "cpu_features", "cores", "python", "versions", "command")


def steps(data: Path | None, quick: bool = False) -> dict[str, str]:
    """Commands by name; those that need data only if it is present.

    data : folder of graphs/, matrices/, pruned/ and tensors/, as `bench/README.md` says
    quick : only small graphs
    """

    def files(folder: str, names: str) -> str:
        paths = [data / folder / f"{n}.npz" for n in names.split()] if data else []
        return " ".join(shlex.quote(str(p)) for p in paths if p.exists())

    twitch, cornell = files("graphs", "twitch_de"), files("graphs", "fb100_cornell5")
    amherst = files("graphs", "fb100_amherst41")
    weights = "dlmc_tf_magnitude_0.7 dlmc_tf_magnitude_0.9 dlmc_tf_magnitude_0.98"
    pruned = files("pruned", f"{weights} dlmc_rn50_magnitude_0.8 dlmc_rn50_magnitude_0.95")
    pruned = f"--pruned {pruned}" if pruned else ""
    tensors = files("tensors", "jf17k_3 kinships")
    tensors = f"--tensor {tensors}" if tensors else ""
    large = "--graph cora" if quick else f"--graph synthetic:ppi {cornell}"
    models = "graph --layer GCN GAT gate 'edge features' --peers PyG Inductor --seconds 3"
    models = f"{models} {large}"
    one = f"--threads 1 --graph {twitch or 'cora'}"
    operators = f"run --rounds 5 --graph cora {twitch} {amherst} {pruned}"
    sparse = "sparse_results --seconds 0.5 --graph"
    sparse += "" if quick else f" {files('matrices', MATRICES)} {amherst}"
    words = {
        "calls": "calls --seconds 16",
        "products 1t": f"products --threads 1 {large}",
        "products 2t": f"products --threads 2 --no-pruned {large}",
        "models 1t": f"{models} --threads 1",
        "models 2t": f"{models} --threads 2",
        "relations 1t": "rgcn --edges 10000 100000 --seconds 1 --cpu-time --threads 1",
        "relations 2t": "rgcn --edges 10000 100000 --seconds 1 --threads 2",
        "sparse 1t": f"{sparse} --threads 1",
        "sparse 2t": f"{sparse} --threads 2",
        "layers": "graph --peers PyG Inductor accelerate sparsetir.nn --seconds 1.5 --threads 1"
        f" --graph cora {twitch}",
        "operators": f"{operators} --op spmm sddmm spmv --threads 1 2",
        FORCED: f"{operators} --op spmm --threads 1 2 --peers mkl",
        "new edges": "new_edges --seconds 3 --numbers 1",
        "exported": f"graph --exported --layer GCN GAT gate --seconds 1 {one}",
        "memory": f"graph --memory --layer GAT --peers PyG Inductor --seconds 0.2 {one}",
        "attention": "attention --threads 2 --seconds 3",
        "convolutions": "sparse_conv --threads 1 --seconds 0.3",
        "steps": f"steps --threads 1 --graph cora {twitch}",
        "tensors": f"mttkrp --rounds 15 {tensors}",
        "expressions": f"expressions --seconds 0.3 --threads 1 --graph cora {twitch}",
        "processes": "distributed --graph generated --model sage --epochs 20 --orders 1",
    }  # fmt: skip
    return words


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if a step failed."""
    todo = steps(args.data, args.quick)
    facts = {**circumstances(args.threads), "quick": args.quick}
    names = chosen("readme", args.only, todo)
    path = path_of(args.out, "readme", facts)
    older = json.loads(path.read_text()) if path.exists() else {}
    # Repeated steps are merged with others of the same commit.
    same = all(older.get(name) == facts[name] for name in ("commit", "quick"))
    if args.only and older and not same:
        raise SystemExit(
            f"readme: argument '--only': expected {path.name} of commit {facts['commit']}, got "
            f"{older['commit']}: run all steps, or name another folder by --out"
        )
    states_by_name = older["results"]["steps"] if same else {}
    begun, states = time.monotonic(), []
    for number, name in enumerate(names):
        progress(f"{number + 1} of {len(names)}: {name}")
        left = min(LONGEST, args.minutes * 60 - (time.monotonic() - begun))
        with tempfile.TemporaryDirectory(prefix="sparsetir-bench-") as folder:
            state, step = measured(name, todo[name], Path(folder), left, args.quick)
        states.append([name, state["state"], f"{state['seconds']:.0f}", todo[name].split()[0]])
        if state["state"] != "done":
            print(f"{name}: {state['state']}\n{state['printed']}", file=sys.stderr)
        if step is not None:
            states_by_name[name] = step
        in_order = {n: states_by_name[n] for n in todo if n in states_by_name}
        write(args.out, "readme", facts, {"steps": in_order}, quiet=True)
    progress("")
    print(path)
    table("The steps; seconds", ["step", "state", "s", "command"], states)
    if any(state != "done" for _, state, *_ in states):
        raise SystemExit(1)


def measured(
    name: str, words: str, folder: Path, limit: float, quick: bool
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The outcome of a step, and its file, without the facts common to all files."""
    command = (sys.executable, "-m", "bench", *shlex.split(words), "--out", str(folder))
    shim = forced(folder) if name == FORCED else {}
    if shim is None:
        return {"state": "not run", "seconds": 0, "printed": "no C compiler"}, None
    state = outcome(Step(name, command + ("--quick",) * quick, 1), limit, shim)
    (path, *_) = (*folder.glob("*.json"), None)
    if path is None or state["state"] != "done":
        return state, None
    record = {k: v for k, v in json.loads(path.read_text()).items() if k not in SHARED}
    said = " ".join(Path(word).name for word in shlex.split(words))
    return state, {"command": said, "took": state["seconds"], **record}


def forced(folder: Path) -> dict[str, str] | None:
    """Variables with which MKL selects its code for Intel's CPUs; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "mkl_as_intel.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SHIM], check=True)
    return {"LD_PRELOAD": str(library)}
