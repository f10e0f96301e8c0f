"""Command line: `python -m bench run` and other commands, which `--help` lists.

`sparsetir bench` is the same.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from bench.names import CONVOLUTIONS, DTYPES, MASKS, OPS, STUDIES
from sparsetir.data.graphs import KINDS, GraphError
from sparsetir.runtime.targets import usable_cpus
from sparsetir.tuning.process import THREADS

RESULTS = Path("bench/results")
GRAPHS = f"A graph is {KINDS}; ':T' behind it transposes."


def parser(prog: str = "python -m bench") -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog=prog, description="Measure sparsetir.", epilog=GRAPHS)
    commands = out.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--quick", action="store_true", help="one small round, to see that it runs")
    common.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    fixed = argparse.ArgumentParser(add_help=False, parents=[common])
    fixed.add_argument(
        "--threads", type=int, help="CPU threads of all libraries (default: all that there are)"
    )
    _add_run(commands.add_parser("run", parents=[common], help="operators, beside their peers"))
    tune = commands.add_parser(
        "tune", parents=[common], help="the tuner against a sweep of all configs: trials, gain"
    )
    _add_problems(tune, "32")
    tune.add_argument("--threads", nargs=1, help='all, one or a number (default: "all")')
    judge = commands.add_parser("judge", help="what got slower from one run to another")
    judge.add_argument("before", type=Path, help="JSON file of `run`")
    judge.add_argument(
        "after", type=Path, nargs="?",
        help="JSON file of `run`; without it `before` is one with --before, which compares itself",
    )  # fmt: skip
    judge.add_argument(
        "--least", type=float, default=0.05, help="smallest change that counts (default: 0.05)"
    )
    plot = commands.add_parser("plot", help="draw the speed-ups of a run, as PNG files beside it")
    plot.add_argument("file", type=Path, help="JSON file of `run`")
    steps = commands.add_parser(
        "steps", parents=[fixed], help="what each primitive of SpMM's schedule is worth"
    )
    steps.add_argument("--graph", nargs="+", default=[], help="default: cora")
    steps.add_argument("--feat", nargs="+", type=int, help="feature sizes (default: 128 512)")
    steps.add_argument("--plot", action="store_true", help="draw a picture beside the JSON file")
    pools = commands.add_parser(
        "pools", parents=[common], help="pools of threads, beside MKL, between torch's operators"
    )
    pools.add_argument("--seconds", type=float, default=4, help="of each size (default: 4)")
    pools.add_argument("--busy", type=int, default=0, help="processes that keep cores meanwhile")
    pools.set_defaults(threads=2)
    calls = commands.add_parser(
        "calls", parents=[common], help="what a call costs beside the kernel, part by part"
    )
    calls.add_argument("--before", type=Path, help="another checkout, to take turns with")
    calls.add_argument("--seconds", type=float, default=60, help="of each version (default: 60)")
    calls.add_argument("--plot", action="store_true", help="draw a picture beside the file")
    calls.set_defaults(threads=1)
    epochs = commands.add_parser(
        "epochs", parents=[common], help="training GCN, SAGE, GAT, and on new edges, beside PyG"
    )
    epochs.add_argument("--graph", nargs="+", default=[], help="default: cora")
    epochs.add_argument("--before", type=Path, help="another checkout, to take turns with")
    epochs.add_argument("--seconds", type=float, default=10, help="of a graph (default: 10)")
    epochs.add_argument("--numbers", nargs="+", type=int, default=[1, 2], help="of threads")
    epochs.set_defaults(threads=2)
    commands.add_parser(
        "compile", parents=[fixed], help="import, parsing, each lowering, build, call overhead"
    )
    code = commands.add_parser(
        "gpucode", parents=[fixed], help="GPU templates by nvcc: registers, spills, widths of loads"
    )
    code.add_argument("--arch", default="sm_90", help="default: sm_90")
    code.add_argument("--kernels", default="", help="those whose names hold this (default: all)")
    convert = commands.add_parser(
        "convert", parents=[fixed], help="bring patterns into other formats, beside scipy"
    )
    formats = commands.add_parser(
        "formats", parents=[fixed], help="every format: is it right, how large, how fast?"
    )
    equal = commands.add_parser(
        "equal_work", parents=[fixed], help="SpMM by chunks across rows, beside blocks of rows"
    )
    hops = commands.add_parser(
        "two_hop", parents=[fixed], help="a program that no template names: default and tuned"
    )
    hops.add_argument("--feat", nargs="+", type=int, help="feature sizes (default: 64 128)")
    hops.add_argument("--trials", type=int, default=40, help="of the search (default: 40)")
    commands.add_parser(
        "amx", parents=[fixed], help="blocks of bfloat16 in the CPU's matrix engine, beside torch"
    )
    blocks = commands.add_parser(
        "blocks", parents=[fixed], help="pruned weights in blocks, beside torch; on a GPU all peers"
    )
    blocks.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    blocks.add_argument(
        "--seconds", type=float, default=20, help="of the comparison on a CPU (default: 20)"
    )
    _add_study(commands.add_parser("study", parents=[fixed], help="what papers say of schedules"))
    day = commands.add_parser(
        "gpu_day", parents=[fixed], help="tests, peers, studies and tuning on a GPU, one by one"
    )
    day.add_argument("--minutes", type=float, default=25, help="for all of it (default: 25)")
    day.add_argument("--target", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal")
    day.add_argument("--only", nargs="+", metavar="STEP", help="only these steps")
    for command in (convert, formats, equal, hops):
        command.add_argument("--graph", nargs="+", default=[], help="graphs beside Cora")
    formats.add_argument(
        "--pruned", nargs="+", default=[], help="npz files of weights by layer; or file.npz:layer"
    )
    formats.add_argument("--layers", type=int, default=1, help="how many of a file (default: 1)")
    formats.add_argument(
        "--hetero", nargs="+", type=Path, default=[], help="npz files of graphs with relations"
    )
    formats.add_argument("--format", nargs="+", help="only these, by their names in the tables")
    attention = commands.add_parser(
        "attention", parents=[fixed], help="sparse attention, beside torch's dense one and Flex"
    )
    attention.add_argument("--mask", nargs="+", choices=MASKS, default=MASKS, help="default: all")
    attention.add_argument(
        "--peers", nargs="*", choices=("dense", "flex", "torch bsr"), help="default: all there are"
    )
    attention.add_argument("--length", type=int, help="default: 4096")
    attention.add_argument(
        "--seconds", type=float, default=20, help="of each comparison (default: 20)"
    )
    attention.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    attention.add_argument("--plot", action="store_true", help="draw a picture beside the file")
    _add_sparse_conv(
        commands.add_parser(
            "sparse_conv", parents=[fixed], help="convolutions of points, beside torch's gathering"
        )
    )
    rgcn = commands.add_parser(
        "rgcn", parents=[fixed], help="relational layers: times and memory, beside PyG's"
    )
    rgcn.add_argument(
        "--graph", nargs="+", help="npz files of graphs with relations; default: random"
    )
    rgcn.add_argument(
        "--edges", nargs="+", type=int, help="of random graphs: 10000 30000 .. (default: all)"
    )
    rgcn.add_argument(
        "--peers", nargs="*", choices=("unfused", "RGCNConv", "FastRGCNConv"), help="default: all"
    )
    rgcn.add_argument(
        "--cpu-time", action="store_true", help="of the processor, where others use it; one thread"
    )
    rgcn.add_argument("--seconds", type=float, default=5, help="of each comparison (default: 5)")
    rgcn.add_argument("--plot", action="store_true", help="draw a picture beside the file")
    spread = commands.add_parser(
        "distributed", parents=[common], help="training on several processes: bytes, memory, time"
    )
    spread.add_argument("--graph", nargs="+", help="files, cora or 'generated' (default: cora)")
    spread.add_argument("--model", nargs="+", choices=("sage", "gat"), default=["sage", "gat"])
    spread.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    spread.add_argument("--partition", nargs="+", choices=("rows", "metis"), default=["rows"])
    spread.add_argument("--epochs", type=int, default=50, help="default: 50")
    spread.add_argument("--hidden", type=int, default=64, help="features (default: 64)")
    spread.add_argument(
        "--most-difference", type=float, default=1e-5, help="of losses, relative, beside what "
        "rounding does (default: 0.00001)",
    )  # fmt: skip
    spread.add_argument(
        "--orders", type=int, default=2, help="of the nodes, to see what rounding does (default: 2)"
    )
    spread.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    spread.set_defaults(threads=1)
    mttkrp = commands.add_parser(
        "mttkrp", parents=[common], help="MTTKRP by schedules of a thesis, beside loops in C++"
    )
    mttkrp.add_argument("--tensor", nargs="+", type=Path, default=[], help="npz: shape, coords")
    mttkrp.add_argument("--dtype", nargs="+", choices=("float32", "float64"), default=["float32"])
    mttkrp.add_argument("--rounds", type=int, default=60, help="turns of each (default: 60)")
    mttkrp.set_defaults(threads=1)
    return out


def _add_sparse_conv(conv: argparse.ArgumentParser) -> None:
    conv.add_argument(
        "--points", nargs="+", type=Path, help="npz files with 'points' (default: generated)"
    )
    conv.add_argument("--voxel", type=float, default=0.05, help="of these points (default: 0.05)")
    conv.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"])
    conv.add_argument("--peers", nargs="*", choices=CONVOLUTIONS, help="default: all")
    conv.add_argument("--seconds", type=float, default=2, help="of each comparison (default: 2)")
    conv.add_argument("--plot", action="store_true", help="draw a picture beside the file")


def _add_problems(command: argparse.ArgumentParser, features: str) -> None:
    command.add_argument("--op", nargs="+", choices=OPS, default=["spmm"], help="default: spmm")
    command.add_argument("--graph", nargs="+", default=[], help="default: cora")
    command.add_argument(
        "--pruned", nargs="+", default=[], help="npz files of weights by layer; or file.npz:layer"
    )
    command.add_argument("--layers", type=int, default=1, help="how many of a file (default: 1)")
    command.add_argument(
        "--synthetic", nargs="+", default=[], help="random graphs by size: cora, ogbn-arxiv, all.."
    )
    command.add_argument("--feat", nargs="+", type=int, help=f"feature sizes (default: {features})")


def _add_study(study: argparse.ArgumentParser) -> None:
    study.add_argument("study", choices=STUDIES, help="which one")
    study.add_argument(
        "--counts", action="store_true",
        help="count what the CUDA text does, on the CPU, where others measure times",
    )  # fmt: skip
    study.add_argument("--full", action="store_true", help="sizes as printed")
    study.add_argument(
        "--target", choices=("cpu", "cuda"), help="default: cuda where there is a device"
    )
    study.add_argument(
        "--data",
        type=Path,
        help="of groups, relations and coarsen: folder of npz (groups: mtx too) files",
    )


def _add_run(run: argparse.ArgumentParser) -> None:
    _add_problems(run, "32 128 512")
    run.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"])
    run.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    run.add_argument("--threads", nargs="+", help='all, one or numbers (default: "all and one")')
    run.add_argument("--rounds", type=int, help="turns of each peer and cell (default: 9)")
    run.add_argument("--peers", nargs="+", help="only these, by their names in the tables")
    run.add_argument("--yardstick", type=Path, help="C++ file of a hand-written SpMM, see README")
    run.add_argument("--tune", action="store_true", help="also the fastest of all configurations")
    run.add_argument(
        "--before", type=Path, help="another checkout of this project, to take turns with"
    )
    run.add_argument("--plot", action="store_true", help="draw the speed-ups")


def main(words: list[str] | None = None, run_as: tuple[str, ...] = ()) -> None:
    """run_as : module and words before `words` that lead here, where it is not this module"""
    words = sys.argv[1:] if words is None else words
    commands = parser(" ".join(run_as) or "python -m bench")
    args = commands.parse_args(words)
    threads = getattr(args, "threads", None)
    if isinstance(threads, list) or args.command in ("run", "tune"):
        threads = 1  # of this process, which only waits for others
    elif threads is None:
        args.threads = threads = len(usable_cpus())
    wanted = {name: str(threads) for name in THREADS}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        # Libraries that are loaded by now have read others.
        command = [sys.executable, "-m", *(run_as or ("bench",)), *words]
        sys.stdout.flush()
        os.execve(sys.executable, command, {**os.environ, **wanted})
    module = "compiling" if args.command == "compile" else args.command
    try:
        importlib.import_module(f"bench.{module}").run(args)
    except GraphError as error:
        raise SystemExit(f"{commands.prog} {args.command}: {error}") from error


if __name__ == "__main__":
    main()
