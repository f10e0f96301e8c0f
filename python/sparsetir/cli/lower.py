"""`sparsetir lower`: the text of a program at one of its stages."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from sparsetir.cli import arguments
from sparsetir.cli.arguments import DTYPES, OPS, REDUCTIONS, Parser, UsageError
from sparsetir.cli.functions import function_of

__all__ = ["add", "run"]

STAGES = ("1", "2", "scheduled", "3", "source", "asm")
EPILOG = f"""\
Stages: 1, the program over coordinates; 2, over positions; scheduled, the same with the schedule
of its template, or the default one; 3, loops over flat buffers, which are compiled; source, what
TVM generates (LLVM IR, or the text of GPU kernels); asm, assembly.

An operator ({", ".join(OPS)}) has the config that a plan for the graph would have, which is printed
on stderr; a file is run, and has to hold the function at its top level.

examples:
  sparsetir lower spmm --stage 1
  sparsetir lower sddmm --feat 64 --graph graph.mtx --stage source --target cuda
  sparsetir lower spmm --stage 3 --config '{{"template": "RowBlocks", "tile": 32, "lanes": 16}}'
  sparsetir lower program.py:spmm --stage 2
"""


# Of `kernel.stages`, by the name of the stage here.
NAMES = {"1": "I", "2": "II", "scheduled": "II scheduled", "3": "III"}


def add(out: Parser) -> None:
    """Add the arguments."""
    out.add_argument("program", metavar="OP|FILE", help=f"{', '.join(OPS)}, or file.py[:function]")
    out.add_argument("--stage", choices=STAGES, default="1", help="default: 1")
    out.add_argument("--target", type=arguments.target, default="llvm", help="default: llvm")
    of_op = out.add_argument_group("of an operator")
    of_op.add_argument("--graph", default="cora", help="default: cora; see `sparsetir tune --help`")
    of_op.add_argument("--feat", type=arguments.at_least(1), help="features (default: 32)")
    of_op.add_argument("--dtype", choices=DTYPES, help="default: that of the graph")
    of_op.add_argument("--reduce", choices=REDUCTIONS, default="sum")
    of_op.add_argument("--threads", type=arguments.at_least(1), help="of the CPU (default: all)")
    of_op.add_argument("--config", type=arguments.config, metavar="JSON", help="of a template")
    out.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    from sparsetir.targets import resolve_target

    target = resolve_target(args.target)
    config = None
    if args.program in OPS:
        stages, config = _operator(args, target)
    else:
        stages = _stages_of(function_of(args.program), args.stage, target)
    text = _text(stages, args.stage, target).rstrip("\n")
    if args.json:
        words = {"program": args.program, "stage": args.stage, "target": str(target)}
        arguments.print_json({**words, "config": config, "text": text})
        return 0
    if config is not None:
        print(f"config: {json.dumps(config)}", file=sys.stderr)
    print(text)
    return 0


def _text(stages: Mapping[str, Any], stage: str, target: Any) -> str:
    from sparsetir.build import kernel_of

    if stage in NAMES:
        return stages[NAMES[stage]].script()
    return kernel_of(dict(stages), target).source("asm" if stage == "asm" else None)


def _operator(args: argparse.Namespace, target: Any) -> tuple[Mapping[str, Any], Any]:
    """The stages of the kernel that a plan has, and its config as data."""
    from sparsetir.request import request
    from sparsetir.schedules.operators.operands import OPERATORS
    from sparsetir.schedules.search.choose import choose
    from sparsetir.schedules.search.configs import to_data
    from sparsetir.sparse_tensor import SparseMatrix
    from sparsetir.tuning.lookup import recorded_config

    wanted = request(
        args.program, SparseMatrix(arguments.graph(args.graph)[1]),
        args.feat or (1 if OPERATORS[args.program].vectors else 32), dtype=args.dtype,
        reduce=args.reduce, target=target, threads=args.threads,
    )  # fmt: skip
    config = args.config or recorded_config(wanted.task())
    config = config or choose(wanted.problem, wanted.statistics, target)
    config.tiles(wanted.feat)  # refuses feature sizes that it does not serve
    return wanted.stages(config), to_data(config)


def _stages_of(func: Any, stage: str, target: Any) -> Mapping[str, Any]:
    """The stages of a function of a file, as far as they are wanted.

    What cannot be lowered can be printed; of a function of stage II its own is as lowered, too.
    """
    from sparsetir.lower import lower
    from sparsetir.sparse_ir.nodes import SparseFunc

    if isinstance(func, SparseFunc):
        return {"I": func} if stage == "1" else lower(func, target=target)
    if stage == "1":
        raise UsageError("argument --stage: the function is of stage 2, it has no stage 1")
    given = {"II": func, "II scheduled": func}
    return given if stage in ("2", "scheduled") else lower(func, target=target)
