"""`sparsetir explain`: what the compiler did with a program, as text or as a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparsetir.cli import arguments
from sparsetir.cli.arguments import Failed, Parser
from sparsetir.cli.expressions import EPILOG as OF_EXPRESSIONS
from sparsetir.cli.expressions import OTHERS
from sparsetir.cli.text import as_text
from sparsetir.runtime.texts import as_html, as_markdown

EPILOG = f"""\
Shows the program; of each loop whether it may run in parallel, with the accesses that prove it or
stand against it; the loops of the schedule, of a dispatch those that the sizes take; the roofline:
bytes, operations, the bound of this machine, and how much of it the kernel reaches.

With --graph the first sparse axis (CSR) gets the matrix: indptr, indices, values and sizes. Arrays
of numbers that are not given are random, outputs zeros; arrays of indices have to be given. On the
CPU the kernel is then run and timed, which takes a second or two. Without arguments it is compiled
and not run. Of an operator it is its plain program, for --feat, --dtype and --reduce; a file is
run, and has to hold the function at its top level.

{OF_EXPRESSIONS}
What becomes of a model of torch shows `sparsetir.explain(model, *inputs)` in Python.

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
        "--arg", action="append", metavar="NAME=VALUE", help="as of `sparsetir tune`; once for each"
    )
    graph = "for the first sparse axis (default beside --feat: cora); see `sparsetir tune --help`"
    arguments.add_operator(out, graph)
    out.add_argument("--schedule", metavar="FILE:NAME", help="function (sch) in a file")
    arguments.add_target(out)
    out.add_argument("--stages", action="store_true", help="print the text of all stages, too")
    out.add_argument("--html", type=Path, metavar="FILE", help="write a page that needs no other")
    out.add_argument("--markdown", type=Path, metavar="FILE", help="write the page as Markdown")
    arguments.add_json(out)


def run(args: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    from sparsetir.cli.explained import explained
    from sparsetir.runtime.file_errors import write_whole

    title, facts, sections = explained(args)
    for path, text in ((args.html, as_html), (args.markdown, as_markdown)):
        if path is not None:
            try:
                write_whole(path, text(title, sections))
            except OSError as error:
                raise Failed(f"{path}: {error.strerror}") from error
    if args.json:
        arguments.print_json({"program": args.program, **facts})
        return 0
    print(as_text(title, sections, folded=args.stages))
    for path in filter(None, (args.html, args.markdown)):
        print(f"\npage: {path}")
    return 0
