"""`sparsetir explain`: what the compiler did with a program, as text or as a page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sparsetir.cli import arguments
from sparsetir.cli.arguments import Facts, Failed, Parser, UsageError
from sparsetir.cli.functions import function_of, operator_named, schedule_of
from sparsetir.cli.text import as_text, readable
from sparsetir.runtime.texts import Section, as_html, as_markdown

if TYPE_CHECKING:
    import scipy.sparse as sp
    from tvm.target import Target

    from sparsetir.runtime.kernel import Kernel
    from sparsetir.runtime.pipeline import Stages
    from sparsetir.sparse_ir.nodes import SparseFunc

EPILOG = """\
Shows the program; of each loop whether it may run in parallel, with the accesses that prove it or
stand against it; the loops of the schedule, of a dispatch those that the sizes take; the roofline:
bytes, operations, the bound of this machine, and how much of it the kernel reaches.

With --graph the first sparse axis (CSR) gets the matrix: indptr, indices, values and sizes. Arrays
of numbers that are not given are random, outputs zeros; arrays of indices have to be given. On the
CPU the kernel is then run and timed, which takes a second or two. Without arguments it is compiled
and not run. Of an operator it is its plain program; a file is run, and has to hold the function at
its top level.

What becomes of a model of torch shows `sparsetir.explain(model, *inputs)` in Python.

examples:
  sparsetir explain spmm --graph cora --arg feat=64
  sparsetir explain spmm.py --graph cora --arg feat=64
  sparsetir explain spmm.py:spmm --graph cora --arg feat=64 --schedule fast.py:apply --html a.html
  sparsetir explain program.py --arg x=x.npy --arg indptr=a.npz --arg indices=a.npz --stages
"""


def add(out: Parser) -> None:
    """Add the arguments."""
    out.add_argument("program", metavar="OP|FILE", help="an operator, or file.py[:function]")
    out.add_argument(
        "--arg", action="append", metavar="NAME=VALUE", help="as of `sparsetir tune`; once for each"
    )
    out.add_argument("--graph", help="for the first sparse axis; see `sparsetir tune --help`")
    out.add_argument("--schedule", metavar="FILE:NAME", help="function (sch) in a file")
    arguments.add_target(out)
    out.add_argument("--stages", action="store_true", help="print the text of all stages, too")
    out.add_argument("--html", type=Path, metavar="FILE", help="write a page that needs no other")
    out.add_argument("--markdown", type=Path, metavar="FILE", help="write the page as Markdown")
    arguments.add_json(out)


def run(args: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    from sparsetir.runtime.file_errors import write_whole

    title, facts, sections = _found(args)
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


def _found(args: argparse.Namespace) -> tuple[str, Facts, list[Section]]:
    """Title, facts for JSON, and sections of the page."""
    import tvm

    from sparsetir.cli import explained
    from sparsetir.runtime.pipeline import kernel_of, lower
    from sparsetir.runtime.pool import count
    from sparsetir.runtime.targets import resolve_target
    from sparsetir.sparse_ir.nodes import SparseFunc

    target = resolve_target(args.target)
    schedule = None if args.schedule is None else schedule_of(args.schedule)
    program = _plain(args, target) if operator_named(args.program) else function_of(args.program)
    if not isinstance(program, SparseFunc):
        raise UsageError("argument OP|FILE: expected a function of stage 1, got one of stage 2")
    given = arguments.named_values(args.arg or [])
    if args.graph is not None:
        given = {**_of_graph(program, arguments.graph(args.graph)[1]), **given}
    values = _all_arguments(program, given) if given else {}
    stages = lower(program, schedule, target=target)
    kernel = kernel_of(stages, target)
    timed = values and target.kind.name == "llvm"
    measured = explained.measured(kernel, values, count()) if timed else None
    sizes = {n: v for n, v in values.items() if isinstance(v, int | float)}
    made = stages["I"]
    loops, orders = explained.loops_of(made), explained.orders_of(made)
    nest = explained.scheduled_loops(stages["II scheduled"], sizes)
    roofline = explained.roofline(explained.work_of(program, values), measured) if values else {}
    by = "the default schedule" if schedule is None else f"the schedule {args.schedule}"
    facts = {
        "target": str(target),
        "sizes": sizes,
        "schedule": args.schedule,
        "loops": loops,
        "order": orders,
        "scheduled": nest,
        "roofline": roofline,
    }
    shown = ", ".join(f"{n}={v:,}" for n, v in sizes.items())
    title = f"{program.name}{f' ({shown})' if shown else ''}, by {by}"
    return title, facts, _sections(facts, stages, kernel, f"TVM {tvm.__version__}", program)


def _plain(args: argparse.Namespace, target: Target) -> SparseFunc:
    """The program of an operator, for the types of the graph."""
    from sparsetir.data.sparse_tensor import SparseMatrix
    from sparsetir.planning.plan import requested
    from sparsetir.schedules.operators.registry import OPERATORS

    operator = OPERATORS.get(args.program)
    if operator is None or operator.program is None:
        raise UsageError(f"argument OP|FILE: {args.program} has no program over one matrix")
    matrix = SparseMatrix(arguments.graph(args.graph or "cora")[1])
    feat = 1 if operator.vectors else 32  # in its types alone: the program has any number
    return operator.program(requested(args.program, matrix, feat, target=target).problem)


def _sections(
    facts: Facts, stages: Stages, kernel: Kernel, versions: str, program: SparseFunc
) -> list[Section]:
    from sparsetir._versions import VERSION
    from sparsetir.cli.explained import roofline_rows

    heads = ("iteration", "loop", "axis", "kind", "parallel", "why")
    rows = [tuple(loop[h] for h in heads) for loop in facts["loops"]]
    of_sizes = "branches that these sizes take" if facts["sizes"] else "all branches"
    machine = roofline_rows(facts["roofline"]) if facts["roofline"] else []
    texts = [(f"stage {name}", readable(func)) for name, func in stages.items()]
    plain = readable(program)
    moved = [] if plain == texts[0][1] else [("as it was written", plain)]
    return [
        Section("Program", code=texts[0][1], folded=moved),
        Section("Loops", heads=heads, rows=rows,
                text=[f"{name}: {order}." for name, order in facts["order"].items()]),
        Section("Schedule", [f"The loops of the kernel ({of_sizes}):"], code=facts["scheduled"]),
        Section("Roofline", rows=machine, text=[] if machine else [
            "Not known without arguments: --graph cora --arg feat=64, or --arg for each array."]),
        Section("Stages", folded=[*texts[1:], ("source", kernel.source().rstrip("\n"))]),
        Section("Made by", [f"sparsetir {VERSION}, {versions}, target {facts['target']}"]),
    ]  # fmt: skip


def _of_graph(program: SparseFunc, matrix: sp.csr_array) -> Facts:
    """Arguments of the first CSR axis: its arrays, its sizes, and the first values over it."""
    for axis in program.axes:
        if axis.kind == "sparse_variable" and axis.parent.kind == "dense_fixed":
            break
    else:
        raise UsageError("argument --graph: the program has no sparse_variable axis under rows")
    m, n = matrix.shape
    found = {
        axis.indptr.name: matrix.indptr.astype(axis.idtype),
        axis.indices.name: matrix.indices.astype(axis.idtype),
    }
    sizes = ((axis.parent.length, m), (axis.length, n), (axis.nnz, matrix.nnz))
    found |= {size.name: value for size, value in sizes if hasattr(size, "name")}
    for buffer in program.buffers:
        names = [a.name for a in buffer.axes or ()]
        if buffer.handle is not None and names == [axis.parent.name, axis.name]:
            found[buffer.handle.name] = matrix.data.astype(buffer.dtype)
            break
    return {str(name): value for name, value in found.items()}


def _all_arguments(program: SparseFunc, given: Facts) -> Facts:
    """With random numbers for the arrays of numbers that are missing, but for outputs."""
    import numpy as np

    from sparsetir.tuning.program import bound_arguments

    try:
        return bound_arguments(program, given, "argument --arg", np.random.default_rng(0))
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
