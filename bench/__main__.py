"""Command line: `python -m bench compile`, `spmm`, `convert` and `formats`."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
# Every library that a benchmark runs reads one of these when it is loaded.
THREADS = ("TVM_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m bench", description="Measure sparsetir.")
    commands = out.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--quick", action="store_true", help="one small round, to see that it runs")
    common.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    common.add_argument(
        "--threads", type=int, help="CPU threads of all libraries (default: all that there are)"
    )
    commands.add_parser(
        "compile", parents=[common], help="import, parsing, each lowering, build, call overhead"
    )
    spmm = commands.add_parser(
        "spmm", parents=[common], help="CSR times dense on this CPU, beside scipy and torch"
    )
    spmm.add_argument(
        "--graph", nargs="+", type=Path, default=[], help="npz or mtx files beside Cora"
    )
    spmm.add_argument("--feat", nargs="+", type=int, help="feature sizes (default: 32 to 512)")
    convert = commands.add_parser(
        "convert", parents=[common], help="bring patterns into other formats, beside scipy"
    )
    formats = commands.add_parser(
        "formats", parents=[common], help="every format: is it right, how large, how fast?"
    )
    for command in (convert, formats):
        command.add_argument(
            "--graph", nargs="+", type=Path, default=[], help="npz or mtx files beside Cora"
        )
    formats.add_argument(
        "--pruned", nargs="+", default=[], help="npz files of weights by layer; or file.npz:layer"
    )
    formats.add_argument("--layers", type=int, default=1, help="how many of a file (default: 1)")
    formats.add_argument(
        "--hetero", nargs="+", type=Path, default=[], help="npz files of graphs with relations"
    )
    formats.add_argument("--format", nargs="+", help="only these, by their names in the tables")
    return out


def main() -> None:
    args = parser().parse_args()
    args.threads = args.threads or len(os.sched_getaffinity(0))
    for name in THREADS:
        os.environ[name] = str(args.threads)
    # Only now, because of the variables above.
    module = "compiling" if args.command == "compile" else args.command
    importlib.import_module(f"bench.{module}").run(args)


if __name__ == "__main__":
    main()
