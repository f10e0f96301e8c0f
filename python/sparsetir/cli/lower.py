"""`sparsetir lower`: the text of a program at one of its stages."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from sparsetir.cli import arguments
from sparsetir.cli.arguments import Facts, Parser, UsageError, coloured
from sparsetir.cli.expressions import EPILOG as OF_EXPRESSIONS
from sparsetir.cli.expressions import OTHERS, is_expression, program_of
from sparsetir.cli.functions import function_of, operator_named, schedule_of
from sparsetir.runtime.texts import readable
from sparsetir.schedules.operators.names import OPS

if TYPE_CHECKING:
    from sparsetir.planning.request import Request
    from sparsetir.records.task import Config

Schedule: TypeAlias = "Callable[..., object] | None"
STAGES = ("1", "2", "scheduled", "3", "source", "asm")
EPILOG = f"""\
Stages: 1, the program over coordinates; 2, over positions; scheduled, the same with the schedule
of its template, or the default one; 3, loops over flat buffers, which are compiled; source, the
code that TVM generates (LLVM IR, or the text of GPU kernels); asm, assembly.

Stage 1 of an operator ({", ".join(OPS)}) is its plain program. The others, and with --template
also stage 1, follow a config: that of --config, the default of the named template, or else the
config of a plan for the graph. It is printed on stderr. A file is run, and must define the function
at its top level. On a terminal the text has colours, unless NO_COLOR is set.

{OF_EXPRESSIONS}
examples:
  sparsetir lower spmm
  sparsetir lower spmm --template
  sparsetir lower spmm --template RowTile --feat 64 --stage scheduled
  sparsetir lower sddmm --feat 64 --graph graph.mtx --stage source --target cuda
  sparsetir lower spmm --stage 3 --config '{{"template": "RowTile", "tile": 32, "lanes": 16}}'
  sparsetir lower program.py:spmm --stage 2 --schedule fast.py:apply
  sparsetir lower "C[i,k] = A[i,j] * X[j,k]" --A cora --X 2708x64 --stage 3
"""


OF_OPERATOR = ("graph", "feat", "dtype", "reduce", "threads", "config", "template")
# Names in `kernel.stages`, by those of the option.
NAMES = {"1": "I", "2": "II", "scheduled": "II scheduled", "3": "III"}


def add(out: Parser) -> None:
    """Add the arguments."""
    out.add_argument("program", metavar="OP|FILE", help=f"{', '.join(OPS)}, {OTHERS}")
    out.add_argument("--stage", choices=STAGES, default="1", help="default: 1")
    out.add_argument("--schedule", metavar="FILE:NAME", help="function (sch) in a file")
    arguments.add_target(out)
    of_op = out.add_argument_group("of an operator")
    arguments.add_operator(of_op, "default: cora; see `sparsetir tune --help`")
    arguments.number(of_op, "--threads", 1, "threads of the CPU (default: all)", most=2**16)
    of_op.add_argument("--config", type=arguments.config, metavar="JSON", help="a config")
    template_help = "use the program of a template (default: the plan's)"
    of_op.add_argument("--template", nargs="?", const="", metavar="NAME", help=template_help)
    arguments.add_json(out)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    from sparsetir.schedules.targets import resolve_target

    target = resolve_target(args.target)
    schedule = None if args.schedule is None else schedule_of(args.schedule)
    config, of_op = None, {name: getattr(args, name) for name in OF_OPERATOR}
    if operator_named(args.program):
        stages, config = _operator(args, schedule, target)
    elif is_expression(args.program):
        refused = {n: x for n, x in of_op.items() if n != "dtype"}
        func, *_ = program_of(args, args.program, refused, at_pattern=args.stage != "1")
        stages = _stages_of(func, args.stage, schedule, target)
    else:
        arguments.refuse(of_op, "a function in a file")
        stages = _stages_of(function_of(args.program), args.stage, schedule, target)
    text = _text(stages, args.stage, target).rstrip("\n")
    if args.json:
        words = {"program": args.program, "stage": args.stage, "target": str(target)}
        arguments.print_json({**words, "config": config, "text": text})
        return 0
    if config is not None:
        print(f"config: {json.dumps(config)}", file=sys.stderr)
    source = "cuda" if target.kind.name == "cuda" else "source"
    print(coloured(text, {"source": source, "asm": "asm"}.get(args.stage, "")))
    return 0


def _text(stages: Mapping[str, object], stage: str, target: object) -> str:
    from sparsetir.runtime.pipeline import kernel_of

    if stage in NAMES:
        return readable(stages[NAMES[stage]])
    return kernel_of(dict(stages), target).source("asm" if stage == "asm" else None)


def _operator(
    args: argparse.Namespace, schedule: Schedule, target: object
) -> tuple[Mapping[str, object], Facts | None]:
    """The stages of an operator's program, plain or by a schedule or config; and the config."""
    from sparsetir.data.sparse_tensor import SparseMatrix
    from sparsetir.planning.plan import requested
    from sparsetir.schedules.operators.registry import OPERATORS
    from sparsetir.schedules.search.configs import to_data

    operator = OPERATORS[args.program]
    wanted = requested(
        args.program,
        SparseMatrix(arguments.graph(args.graph or "cora")[1]),
        args.feat or (1 if operator.vectors else arguments.FEAT),
        dtype=args.dtype,
        reduce=args.reduce or "sum",
        target=target,
        threads=args.threads,
    )
    if schedule is not None:
        arguments.refuse({"config": args.config, "template": args.template}, "a --schedule")
    if schedule is not None or args.stage == "1" and args.config is args.template is None:
        assert operator.program is not None
        return _stages_of(operator.program(wanted.problem), args.stage, schedule, target), None
    config = _config(args, wanted)
    config.tiles(wanted.feat)  # raises for unsupported feature sizes
    return wanted.stages(config), to_data(config)


def _config(args: argparse.Namespace, wanted: Request) -> Config:
    """The passed config, or else that of the named template, or that of a plan."""
    from sparsetir.records.records import recorded_config
    from sparsetir.schedules.search.configs import from_data

    if args.config is not None:
        if args.template and type(args.config).__name__ != args.template:
            raise UsageError("argument --template: expected the one of --config, or none")
        return args.config
    if not args.template:
        return recorded_config(wanted.task()) or wanted.chosen()
    for config in wanted.candidates():
        if type(config).__name__ == args.template:
            return config
    try:
        return from_data({"template": args.template})
    except ValueError as error:
        raise UsageError(f"argument --template: {error}") from error


def _stages_of(
    func: object, stage: str, schedule: Schedule, target: object
) -> Mapping[str, object]:
    """The stages of a function, lowered only as far as needed, so that any function can be printed.

    A function of stage II stands for that stage both as lowered and as scheduled.
    """
    from sparsetir.runtime.pipeline import lower
    from sparsetir.sparse_ir.nodes import SparseFunc

    if isinstance(func, SparseFunc):
        plain = stage == "1" and schedule is None
        return {"I": func} if plain else lower(func, schedule, target=target)
    arguments.refuse({"schedule": schedule}, "a function of stage 2")
    if stage == "1":
        raise UsageError("argument --stage: the function is of stage 2, it has no stage 1")
    stages = {"II": func, "II scheduled": func}
    return stages if stage in ("2", "scheduled") else lower(func, target=target)
