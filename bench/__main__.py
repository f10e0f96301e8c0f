"""Command line: `python -m bench compile` and `python -m bench spmm`."""

from __future__ import annotations

import argparse
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
    return out


def main() -> None:
    args = parser().parse_args()
    args.threads = args.threads or len(os.sched_getaffinity(0))
    for name in THREADS:
        os.environ[name] = str(args.threads)
    # Only now, because of the variables above.
    if args.command == "compile":
        from bench import compiling

        compiling.run(args)
    else:
        from bench import spmm

        spmm.run(args)


if __name__ == "__main__":
    main()
