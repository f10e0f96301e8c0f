"""Command line: `python -m bench run` and other commands, listed by `--help`.

`sparsetir bench` is the same.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsetir.cli.arguments import Failed, UsageError, add_modules, import_modules
from sparsetir.data.graphs import KINDS, GraphError
from sparsetir.machine import this_machine
from sparsetir.tuning.process import THREADS

os.environ.setdefault("SPARSETIR_KERNELS", "")  # compile times are of kernels compiled here
RESULTS = Path("bench/results")
GRAPHS = (
    f"A graph is {KINDS}; ':T' behind it transposes; or random, by size: synthetic:cora, ppi, .."
)
DTYPES = ("float32", "float16", "bfloat16")
# Commands that are not in a module of their name.
MODULES = {"calls": "checkouts", "new_edges": "checkouts"}
Option = tuple[tuple[str, ...], dict[str, Any]]


def option(*names: str, **options: Any) -> Option:
    """An option of a command, in the form of `add_argument`."""
    return names, options


def flag(name: str, text: str) -> Option:
    return option(name, action="store_true", help=text)


def number(name: str, default: Any = None, text: str = "", kind: Any = int, **more: Any) -> Option:
    help_text = f"{text} (default: {default})" if default is not None and text else text
    return option(name, type=kind, default=default, help=help_text, **more)


def some(name: str, default: Any = None, text: str = "", **more: Any) -> Option:
    """An option with any number of values."""
    return option(name, nargs=more.pop("nargs", "+"), default=default, help=text, **more)


def one_of(module: str, table: str) -> Callable[[str], str]:
    """A check of a word: it must be a key of a module's table, imported only if there is a word."""

    def check(text: str) -> str:
        names = getattr(importlib.import_module(module), table)
        if text not in names:
            raise argparse.ArgumentTypeError(f"expected {', '.join(names)}, got {text!r}")
        return text

    return check


THREADS_OF_ALL = number("--threads", None, "CPU threads of all libraries (default: all)")
PLOT = flag("--plot", "draw pictures beside the JSON file")
GRAPH = some("--graph", [], "default: cora")
BEFORE = option("--before", type=Path, help="another checkout, to take turns with")
TARGET = option("--target", choices=("cpu", "cuda"), default="cpu")
PRUNED = some("--pruned", [], "npz files of weights by layer; or file.npz:layer")
LAYERS = number("--layers", 1, "how many of a file")
OPERATORS = one_of("sparsetir.schedules.operators.registry", "OPERATORS")


def features(default: str) -> Option:
    return some("--feat", None, f"feature sizes (default: {default})", type=int)


def keys(name: str, module: str, table: str, first: str) -> Option:
    return some(name, None, f"default: all: {first} ..", type=one_of(module, table))


def peers(*names: str, text: str = "default: all") -> Option:
    return some("--peers", None, text, nargs="*", choices=names)


def seconds(default: float, of: str) -> Option:
    return number("--seconds", default, f"of {of}", float)


# By name: description, own options, and the threads of this process (None: an option).
COMMANDS: dict[str, tuple[str, tuple[Option, ...], int | None]] = {
    "run": ("operators, beside their peers", (
        some("--op", ["spmm"], "default: spmm", type=OPERATORS, metavar="OP"),
        GRAPH, PRUNED, LAYERS, features("32 128 512"), TARGET, PLOT,
        some("--dtype", ["float32"], choices=DTYPES),
        some("--threads", None, 'all, one or numbers (default: "all and one")'),
        number("--rounds", None, "turns of each peer and cell (default: 9)"),
        some("--peers", None, "only these, by their names in the tables"),
        BEFORE,
    ), 1),
    "judge": ("what got slower from one run to another", (
        option("before", type=Path, help="JSON file of `run`"),
        option("after", type=Path, nargs="?", help="JSON file of `run`; without it `before` is one "
               "with --before, which compares itself"),
        number("--least", 0.05, "smallest change that counts", float),
    ), None),
    "steps": ("what each primitive of SpMM's schedule is worth", (
        THREADS_OF_ALL, GRAPH, features("128 512"), PLOT,
    ), None),
    "calls": ("what a call costs beside the kernel", (BEFORE, seconds(60, "each version")), 1),
    "new_edges": ("layers on edges that are new in each step, beside PyG", (
        BEFORE, seconds(10, "each size"), some("--numbers", [1, 2], "of threads", type=int),
    ), 2),
    "graph": ("models through torch.compile, beside PyG and Inductor", (
        THREADS_OF_ALL, GRAPH, seconds(10, "each layer and graph"),
        keys("--layer", "bench.graph", "LAYERS", "raw GCN SAGE GIN GAT GATv2 Transformer gate"),
        peers("PyG", "PyG, CSR", "Inductor", "backend, rest by Inductor", "accelerate",
              "sparsetir.nn"),
        flag("--shuffle", "edges in no order"),
        flag("--memory", "what an epoch takes, by each way in a process of its own"),
        flag("--exported", "inference by libraries that need no torch, in place of epochs"),
    ), None),
    "examples": ("models of PyG's examples, trained through torch.compile and without", (
        THREADS_OF_ALL, seconds(2, "epochs of each model"), number("--seeds", 3, "of each model"),
        keys("--model", "bench.tasks", "EXAMPLES", "GCN ChebNet GraphSAGE GAT"),
        peers("Inductor", text="default: Inductor"),
    ), None),
    "compile": ("from a program to each stage and a kernel", (THREADS_OF_ALL,), None),
    "gpucode": ("GPU templates by nvcc: registers, spills, widths of loads", (
        THREADS_OF_ALL, option("--arch", default="sm_90", help="default: sm_90"),
        option("--kernels", default="", help="those whose names hold this (default: all)"),
    ), None),
    "gpu_counts": ("what GPU kernels do, by their PTX, beside plain ones: no GPU, no times", (
        option("--kernels", default="", help="those whose names hold this (default: all)"),
    ), 1),
    "readme": ("all figures of the README and the pages, in one file", (
        THREADS_OF_ALL, option("--data", type=Path, help="graphs/, matrices/, pruned/, tensors/"),
        number("--minutes", 40, "for all of it", float),
        some("--only", None, "these steps anew", metavar="STEP"),
    ), None),
    "products": ("`A @ X` beside scipy and torch, pruned weights beside dense ones", (
        THREADS_OF_ALL, some("--graph", [], "default: cora", nargs="*"),
        seconds(1, "each comparison"), flag("--no-pruned", "only `A @ X`"),
    ), None),
    "sparse_results": ("products and sums of sparse matrices, beside scipy and MKL", (
        THREADS_OF_ALL, some("--graph", [], "beside cora", nargs="*"),
        seconds(1, "each comparison"),
    ), None),
    "expressions": ("lines of index notation, beside scipy, sparse, GraphBLAS, tensora, torch", (
        THREADS_OF_ALL, GRAPH, seconds(1, "each line and graph"),
    ), None),
    "blocks": ("pruned weights in blocks, beside torch; on a GPU all peers", (
        THREADS_OF_ALL, TARGET, seconds(20, "each comparison on a CPU"),
    ), None),
    "gpu_day": ("tests, peers and tuning on a GPU, one by one", (
        THREADS_OF_ALL, number("--minutes", 25, "for all of it", float),
        option("--target", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal"),
        some("--only", None, "only these steps", metavar="STEP"),
    ), None),
    "attention": ("sparse attention, beside torch's dense one and Flex", (
        THREADS_OF_ALL,
        keys("--mask", "bench.attention", "MASKS", "band butterfly"),
        peers("dense", "flex", "torch bsr"),
        number("--length", None, "default: 4096"), seconds(20, "each comparison"), TARGET,
    ), None),
    "sparse_conv": ("convolutions of points, beside torch's gathering", (
        THREADS_OF_ALL,
        some("--dtype", ["float32"], choices=DTYPES),
        seconds(2, "each comparison"),
    ), None),
    "rgcn": ("relational layers, beside PyG's", (
        THREADS_OF_ALL,
        some("--edges", None, "of random graphs: 10000 30000 .. (default: all)", type=int),
        peers("RGCNConv", "FastRGCNConv"),
        flag("--cpu-time", "of the processor, where others use it; one thread"),
        seconds(5, "each comparison"),
    ), None),
    "distributed": ("training on several processes: bytes, memory, time", (
        some("--graph", None, "files, cora or 'generated' (default: cora)"),
        some("--model", ["sage", "gat"], choices=("sage", "gat")),
        some("--processes", [1, 2, 4], type=int), number("--epochs", 50, "of each"),
        number("--orders", 2, "of the nodes, to see what rounding does"),
    ), 1),
    "mttkrp": ("MTTKRP by schedules of a thesis, beside loops in C++", (
        some("--tensor", [], "npz: shape, coords", type=Path),
        some("--dtype", ["float32"], choices=("float32", "float64")),
        number("--rounds", 60, "turns of each"),
    ), 1),
}  # fmt: skip


def parser(prog: str = "python -m bench") -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog=prog, description="Measure sparsetir.", epilog=GRAPHS)
    commands = out.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--quick", action="store_true", help="one small round, to see that it runs")
    common.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    add_modules(common)
    for name, (text, options, threads) in COMMANDS.items():
        parents = [] if name == "judge" else [common]  # judge measures nothing
        command = commands.add_parser(name, parents=parents, help=text)
        for names, keywords in options:
            command.add_argument(*names, **keywords)
        if threads is not None and name != "run":
            command.set_defaults(threads=threads)
    return out


def main(words: list[str] | None = None, run_as: tuple[str, ...] = ()) -> None:
    """Run a command; run_as : module and words before `words` that lead here, if not this module"""
    words = sys.argv[1:] if words is None else words
    commands = parser(" ".join(run_as) or "python -m bench")
    try:
        import_modules(words)
    except (Failed, UsageError) as error:
        raise SystemExit(f"{commands.prog}: {error}") from error
    args = commands.parse_args(words)
    threads = COMMANDS[args.command][2]  # of this process, which may only wait for others
    if threads is None:
        args.threads = threads = getattr(args, "threads", None) or len(this_machine().cpus)
    wanted = {name: str(threads) for name in THREADS}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        # Libraries loaded by now have read other values.
        command = [sys.executable, "-m", *(run_as or ("bench",)), *words]
        sys.stdout.flush()
        os.execve(sys.executable, command, {**os.environ, **wanted})
    try:
        importlib.import_module(f"bench.{MODULES.get(args.command, args.command)}").run(args)
    except GraphError as error:
        raise SystemExit(f"{commands.prog} {args.command}: {error}") from error


if __name__ == "__main__":
    main()
