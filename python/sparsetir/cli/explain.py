"""`sparsetir explain`: what the compiler did with a program, as text or as a page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sparsetir.cli import arguments
from sparsetir.cli.arguments import Failed, Parser, UsageError, coloured
from sparsetir.cli.expressions import EPILOG as OF_EXPRESSIONS
from sparsetir.cli.expressions import OTHERS

if TYPE_CHECKING:
    from tvm.target import Target

    from sparsetir.data.sparse_tensor import SparseMatrix
    from sparsetir.runtime.explained import ProgramExplanation
    from sparsetir.sparse_ir.nodes import SparseFunc

EPILOG = f"""\
Shows the program; for each loop whether it may run in parallel, with the accesses that prove or
prevent it; the loops of the schedule (of a dispatch, the branch that the sizes take); the roofline:
bytes, operations, the bound of this machine, and the fraction of it that the kernel reaches.

With --graph the first sparse axis (CSR) gets the matrix: indptr, indices, values and sizes. Missing
arrays of floats are random, missing outputs zeros; arrays of indices are required. On the CPU the
kernel is then run and timed, which takes a second or two. Without arguments it is only compiled.
For an operator it is the plain program, with --feat, --dtype and --reduce. A file is run, and must
define the function at its top level.

{OF_EXPRESSIONS}
In Python, `sparsetir.explain` shows the same, and also explains torch models.

examples:
  sparsetir explain spmm --graph cora --feat 64
  sparsetir explain spmm.py --graph cora --arg feat=64
  sparsetir explain spmm.py:spmm --graph cora --arg feat=64 --schedule fast.py:apply --html a.html
  sparsetir explain program.py --arg x=x.npy --arg indptr=a.npz --arg indices=a.npz --stages
  sparsetir explain "S[i,j] = A[i,j] * X[i,k] * Y[j,k]" --A cora --X 2708x64 --Y 2708x64 --like A
"""


def add(out: Parser) -> None:
    """Add the arguments."""
    out.add_argument("program", metavar="OP|FILE", help=f"an operator, {OTHERS}")
    out.add_argument(
        "--arg", action="append", metavar="NAME=VALUE", help="see `sparsetir tune`; once for each"
    )
    graph = "for the first sparse axis (default with --feat: cora); see `sparsetir tune --help`"
    arguments.add_operator(out, graph)
    out.add_argument("--schedule", metavar="FILE:NAME", help="function (sch) in a file")
    arguments.add_target(out)
    out.add_argument("--stages", action="store_true", help="print the text of all stages, too")
    out.add_argument("--html", type=Path, metavar="FILE", help="write a self-contained page")
    out.add_argument("--markdown", type=Path, metavar="FILE", help="write the page as Markdown")
    arguments.add_json(out)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    from sparsetir.runtime.file_errors import write_whole
    from sparsetir.runtime.texts import as_text

    told = _explained(args)
    for path, text in ((args.html, told.html), (args.markdown, told.markdown)):
        if path is not None:
            try:
                write_whole(path, text())
            except OSError as error:
                raise Failed(f"{path}: {error.strerror}") from error
    if args.json:
        arguments.print_json({"program": args.program, **told.facts})
        return 0
    print(as_text(told.title, told.sections, folded=args.stages, coloured=coloured))
    for path in filter(None, (args.html, args.markdown)):
        print(f"\npage: {path}")
    return 0


def _explained(args: argparse.Namespace) -> ProgramExplanation:
    """The explanation of the program that the arguments name."""
    from sparsetir.cli.expressions import is_expression, program_of
    from sparsetir.cli.functions import arguments_of, function_of, operator_named, schedule_of
    from sparsetir.data.sparse_tensor import SparseMatrix
    from sparsetir.runtime.explained import explain_program
    from sparsetir.schedules.targets import resolve_target
    from sparsetir.sparse_ir.nodes import SparseFunc

    target = resolve_target(args.target)
    schedule = None if args.schedule is None else schedule_of(args.schedule)
    op, expression = operator_named(args.program), is_expression(args.program)
    # The types of an operator's program are those of a graph.
    graph = arguments.graph(args.graph or "cora")[1] if op or args.graph else None
    values = arguments.named_values(args.arg or [])
    if op:
        program = _plain(args, SparseMatrix(graph), target)
        named = [p.name for p in program.params]
        feat = args.feat or (arguments.FEAT if args.graph else None)
        values = {"feat": feat, **values} if feat and "feat" in named else values
        graph = graph if args.graph or args.feat and not args.arg else None
    elif expression:
        refused = {name: getattr(args, name) for name in ("graph", "arg", "feat", "reduce")}
        program, values, _ = program_of(args, args.program, refused)
    else:
        options = {name: getattr(args, name) for name in ("feat", "dtype", "reduce")}
        arguments.refuse(options, "a function in a file")
        program = function_of(args.program)
    if not isinstance(program, SparseFunc):
        raise UsageError("argument OP|FILE: expected a function of stage 1, got one of stage 2")
    return explain_program(
        program, arguments_of(program, values, graph), schedule=schedule, target=target,
        name=args.program if expression else "", schedule_name=args.schedule,
    )  # fmt: skip


def _plain(args: argparse.Namespace, matrix: SparseMatrix, target: Target) -> SparseFunc:
    """The program of an operator, for the types of the graph."""
    from sparsetir.planning.plan import requested
    from sparsetir.schedules.operators.registry import OPERATORS

    operator = OPERATORS.get(args.program)
    if operator is None or operator.program is None:
        raise UsageError(f"argument OP|FILE: {args.program} has no program over one matrix")
    feat = args.feat or (1 if operator.vectors else arguments.FEAT)  # the program takes any number
    options = {"dtype": args.dtype, "reduce": args.reduce or "sum", "target": target}
    return operator.program(requested(args.program, matrix, feat, **options).problem)
