"""`sparsetir lower`: the text of a program at one of its stages."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsetir.cli import arguments
from sparsetir.cli.arguments import DTYPES, OPS, REDUCTIONS, Failed, UsageError, add_command

__all__ = ["add", "run"]

STAGES = ("1", "2", "scheduled", "3", "source", "asm")
EPILOG = f"""\
Stages: 1, the program over coordinates; 2, over positions; scheduled, the same with the schedule
of its template, or the default one; 3, loops over flat buffers; source, what TVM generates (LLVM
IR, or the text of GPU kernels); asm, assembly.

An operator ({", ".join(OPS)}) has the config that a plan for the graph would have, which is printed
on stderr; a file is run, and has to hold the function at its top level.

examples:
  sparsetir lower spmm --stage 1
  sparsetir lower sddmm --feat 64 --graph graph.mtx --stage source --target cuda
  sparsetir lower spmm --stage 3 --config '{{"template": "RowBlocks", "tile": 32, "lanes": 16}}'
  sparsetir lower program.py:spmm --stage 2
"""


@dataclass(frozen=True)
class Program:
    """A function and how it is scheduled.

    first : of stage I, or a PrimFunc of the user
    schedule : (stage-II function) -> scheduled
    """

    first: Any
    schedule: Callable[[Any], Any]


def add(commands: Any) -> None:
    """Add the command."""
    title = "print a stage of an operator's program, or of a function in a file"
    out = add_command(commands, "lower", run, title, EPILOG)
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
    from sparsetir.build import resolve_target

    target = resolve_target(args.target)
    config = None
    if args.program in OPS:
        program, config = _operator(args, target)
    else:
        program = _from_file(args.program, target)
    text = _text(program, args.stage, target).rstrip("\n")
    if args.json:
        words = {"program": args.program, "stage": args.stage, "target": str(target)}
        arguments.print_json({**words, "config": config, "text": text})
        return 0
    if config is not None:
        print(f"config: {json.dumps(config)}", file=sys.stderr)
    print(text)
    return 0


def _text(program: Program, stage: str, target: Any) -> str:
    from sparsetir.build import build
    from sparsetir.sparse_ir.lower_sparse_buffer import lower_sparse_buffer
    from sparsetir.sparse_ir.lower_sparse_iter import lower_sparse_iter
    from sparsetir.sparse_ir.nodes import SparseFunc

    func = program.first
    if stage == "1":
        if not isinstance(func, SparseFunc):
            raise UsageError("argument --stage: the function is of stage 2, it has no stage 1")
        return func.script()
    second = lower_sparse_iter(func) if isinstance(func, SparseFunc) else func
    if stage == "2":
        return second.script()
    scheduled = program.schedule(second)
    if stage == "scheduled":
        return scheduled.script()
    if stage == "3":
        return lower_sparse_buffer(scheduled).script()
    return build(scheduled, target).source("asm" if stage == "asm" else None)


def _operator(args: argparse.Namespace, target: Any) -> tuple[Program, Mapping[str, Any]]:
    """The program of a template, and its config as data."""
    from sparsetir.plan import _problem
    from sparsetir.schedules.default import is_gpu
    from sparsetir.schedules.search.choose import choose
    from sparsetir.schedules.search.configs import to_data
    from sparsetir.schedules.templates.registry import template_of
    from sparsetir.sparse_tensor import SparseMatrix
    from sparsetir.tuning.lookup import recorded_config
    from sparsetir.tuning.task import Task

    op, matrix = args.program, SparseMatrix(arguments.graph(args.graph)[1])
    feat = args.feat or (1 if op == "spmv" else 32)
    _, problem, given, _ = _problem(
        op, matrix, feat, args.dtype, args.reduce, None, target, args.threads
    )
    task = Task(op, matrix, feat, problem.dtype, args.reduce, None, target, given.threads)
    config = args.config or recorded_config(task) or choose(problem, given, target)
    template = template_of(config, problem, is_gpu(target))
    config.tiles(feat)
    compiled = config.compiled

    def schedule(second: Any) -> Any:
        return template.schedule(second, problem, compiled, target)

    return Program(template.program(problem, compiled), schedule), to_data(config)


def _from_file(text: str, target: Any) -> Program:
    """A decorated function of a Python file, which is run."""
    from tvm import tirx

    from sparsetir.schedules.default import default_schedule
    from sparsetir.sparse_ir.nodes import SparseFunc

    path, _, wanted = text.partition(".py:")
    file = Path(path if path.endswith(".py") else f"{path}.py")
    if not text.endswith(".py") and not wanted:
        raise UsageError(f"argument OP|FILE: expected {', '.join(OPS)} or a .py file, got {text!r}")
    if not file.is_file():
        raise UsageError(f"argument OP|FILE: {file}: no such file")
    spec = importlib.util.spec_from_file_location(f"sparsetir_lower_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where Python looks for the source of its functions
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise Failed(f"{file}: {type(error).__name__}: {error}") from error
    kinds = (SparseFunc, tirx.PrimFunc)
    found = {name: value for name, value in vars(module).items() if isinstance(value, kinds)}
    if not found:
        raise UsageError(f"argument OP|FILE: {file} holds no @T.prim_func at its top level")
    if not wanted and len(found) > 1:
        one = f"{file}:{next(iter(found))}"
        raise UsageError(f"argument OP|FILE: {file} holds {', '.join(found)}: name one, as {one}")
    func = found.get(wanted or next(iter(found)))
    if func is None:
        raise UsageError(f"argument OP|FILE: {file} has no {wanted}, but {', '.join(found)}")
    own = not isinstance(func, SparseFunc)
    return Program(func, lambda second: second if own else default_schedule(second, target))
