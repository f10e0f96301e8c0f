"""`sparsetir tune`: search for an operator on a graph, or a program with arguments."""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparsetir.cli import arguments
from sparsetir.cli.arguments import Failed, Parser, UsageError, number
from sparsetir.cli.expressions import EPILOG as OF_EXPRESSIONS
from sparsetir.cli.expressions import OTHERS, is_expression, program_of
from sparsetir.cli.functions import arguments_of, function_of, is_file, schedule_of
from sparsetir.schedules.operators.names import NAMED, SOFTMAX, is_message

if TYPE_CHECKING:
    from sparsetir.tuning.tuned import Search, Trial

INTERRUPTED = 130
MOST_SECONDS = 10**8
WITHOUT = (*SOFTMAX, "spgemm")  # operators without a number of features
COSTS = ("seconds", "median", "compile_seconds", "convert_seconds", "padding", "bytes")

EPILOG = f"""\
A graph is cora, an .npz file (file.npz:layer for one of several matrices), .mtx, an edge list
(.txt, .csv, .tsv, .el), or a folder of PyG or DGL; the suffix ":T" transposes. Without names of
columns (source, dst, weight) edges are row (target), column (source) and maybe weight. For rgms it
is an .npz file with relations: num_nodes, src, dst and etype. spgemm multiplies the matrix by
itself, or by its transpose if it is not square.

Messages and their reduction have DGL's names: u_add_e_max, copy_u_mean, u_mul_e_sum and so on, with
any name of --reduce for the reduction; u_dot_v is sddmm.

Each feature size is a separate search. Results are kept (`sparsetir records list`), and later plans
of the same operator and pattern use them; a stopped search continues where it ended. The report is
written to sparsetir-tune-OP-GRAPH-FEAT.html in this folder, with -2, -3 and so on after FEAT if
that file exists; a file named by --report is replaced.

A function in a file is tuned with the arguments of --arg: numbers, .npy files, or arrays of .npz
files (file.npz:key, by default the parameter's name). Sizes that shapes imply, and outputs, may be
left out. With --graph the first sparse axis (CSR) gets the matrix; other missing arrays of floats
are random. Without --schedule its iterations are tiled; --space then replaces some of the choices.

{OF_EXPRESSIONS}
examples:
  sparsetir tune spmm --graph cora --feat 32 128 --trials 64
  sparsetir tune sddmm --graph edges.csv --seconds 120 --workers 2 --threads 1
  sparsetir tune spmm --graph weights.npz:conv1 --target '{{"kind": "cuda", "arch": "sm_90"}}'
  sparsetir tune spmm --graph ~/data/Cora --json > tuned.json
  sparsetir tune rgms --graph aifb.npz --feat 16 --feat-in 32 --unweighted
  sparsetir tune attention --graph cora --feat 64 --heads 8
  sparsetir tune u_add_e_max --graph cora --feat 32 --edge-feat 32
  sparsetir tune program.py:two_hop --arg x=x.npy --arg indptr=a.npz --arg indices=a.npz
  sparsetir tune spmm.py --graph cora --arg feat=64
  sparsetir tune distances --modules distances_op --graph cora
  sparsetir tune program.py --arg a=a.npz:data --schedule fast.py:apply --space '{{"tile": [1, 2]}}'
  sparsetir tune "C[i,k] = A[i,j] * X[j,k]" --A cora --X 2708x64

To compare with other libraries, in a checkout: python -m bench run --op spmm --graph mine.npz
"""


def add(out: Parser) -> None:
    """Add the arguments."""
    what = f"{', '.join(NAMED)}, a message, {OTHERS}"
    out.add_argument("program", metavar="OP|FILE", help=what)
    group = out.add_argument_group("of an operator")
    graph = "see below; for a function, the matrix of its first sparse axis"
    arguments.add_operator(group, graph, nargs="+", metavar="N")
    number(group, "--heads", 1, "number of matrices that share the pattern")
    help_text = "for rgms and attention: features of X, of queries and keys (default: --feat)"
    number(group, "--feat-in", 1, help_text, metavar="N")
    help_text = "for messages: features per edge, 1 or --feat (default: values of the graph)"
    number(group, "--edge-feat", 1, help_text, metavar="N")
    help_text = "for rgms: all values are one"
    how: dict[str, Any] = {"dest": "weighted", "action": "store_const", "const": False}
    group.add_argument("--unweighted", help=help_text, **how)
    group = out.add_argument_group("of a function in a file")
    help_text = "the value of a parameter; once for each"
    group.add_argument("--arg", action="append", metavar="NAME=VALUE", help=help_text)
    group.add_argument("--schedule", metavar="FILE:NAME", help="function (sch, config) in a file")
    help_text = "lists of choices by name"
    group.add_argument("--space", type=arguments.mapping, metavar="JSON", help=help_text)
    arguments.add_target(out)
    number(out, "--threads", 1, "threads of the CPU (default: all)", most=2**16)
    group = out.add_argument_group("search")
    number(group, "--trials", 1, "configs to measure", default=64)
    number(group, "--seconds", 0.001, "stop after this time", float, MOST_SECONDS)
    help_text = "auto: exhaustive if there are no more configs than trials, else tpe"
    samplers = ("auto", "tpe", "random", "exhaustive")
    group.add_argument("--sampler", choices=samplers, default="auto", help=help_text)
    number(group, "--seed", 0, "seed of the sampler", default=0)
    number(group, "--workers", 1, "parallel measurements", default=1)
    help_text = "do not begin with configs of similar graphs"
    group.add_argument("--no-transfer", dest="transfer", action="store_false", help=help_text)
    group = out.add_argument_group("measuring")
    limit: dict[str, Any] = {"default": 60.0, "metavar": "SECONDS"}
    number(group, "--time-limit", 0.001, "limit per config", float, MOST_SECONDS, **limit)
    help_text = "limit per config, such as 4G"
    group.add_argument("--memory-limit", type=arguments.size, metavar="SIZE", help=help_text)
    help_text = "a device of TVM's RPC tracker"
    group.add_argument("--remote", type=_remote, metavar="HOST:PORT:KEY", help=help_text)
    group = out.add_argument_group("results")
    group.add_argument("--records", metavar="PATH", help='the file of results; "" for none')
    help_text = "database that machines share, such as postgresql+psycopg://user@host/name"
    group.add_argument("--storage", metavar="URL", help=help_text)
    report = group.add_mutually_exclusive_group()
    report.add_argument("--report", type=Path, metavar="PATH", help="HTML file, or a folder")
    report.add_argument("--no-report", action="store_true", help="write no HTML file")
    arguments.add_json(group)


class Job(NamedTuple):
    """A search: a title for its progress, arguments of `tune`, and the path of its report."""

    title: str
    given: tuple[Any, ...]
    options: dict[str, Any]
    report: Path


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    is_program = is_file(args.program) or is_expression(args.program)
    if args.graph is None and not is_program:
        expected = f"expected a graph for {args.program}, such as cora or a file"
        raise UsageError(f"argument --graph: {expected}")
    from sparsetir.records.records import Records
    from sparsetir.tuning.progress import Bar
    from sparsetir.tuning.search import tune

    searches = _program_jobs(args) if is_program else _operator_jobs(args)
    where = None if args.records == "" else Records(args.records).path
    runs, codes = list[dict[str, object]](), [0]
    for title, call, options, report in searches:
        if runs and not args.json:
            print()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "tune: ", RuntimeWarning)  # the table has them
            tuned = tune(*call, **options, progress=Bar(title, args.seconds))
        facts, code = _print_results(args, tuned, options.get("graph", ""), where, report)
        runs.append(facts)
        codes.append(code)
        if tuned.interrupted:
            break
    if args.json:
        about = {"program" if is_program else "op": args.program}
        about |= {"graph": options["graph"]} if "graph" in options else {}
        kept = None if where is None else str(where)
        arguments.print_json({**about, "records": kept, "runs": runs})
    return max(codes)


def _program_jobs(args: argparse.Namespace) -> Iterator[Job]:
    """The search for an expression, or a function of a file."""
    from sparsetir.sparse_ir.nodes import SparseFunc
    from sparsetir.tuning.search import OperatorOptions, ProgramOptions

    taken = _given(args, ProgramOptions)
    others = {n: x for n, x in _given(args, OperatorOptions).items() if n not in taken}
    others["feat"] = args.feat
    _check_device(args)
    schedule = None if args.schedule is None else schedule_of(args.schedule)
    if is_expression(args.program):
        others |= {"graph": args.graph, "arg": args.arg, "dtype": None}
        program, values, name = program_of(args, args.program, others)
    else:
        arguments.refuse(others, "a function in a file")
        name, graph = (None, None) if args.graph is None else arguments.graph(args.graph)
        values = arguments.named_values(args.arg or [])
        program = function_of(args.program)
        if isinstance(program, SparseFunc):
            values = arguments_of(program, values, graph)
    path = report_path(args.report, program.name if name is None else f"{program.name}-{name}")
    options = {**taken, "schedule": schedule} | ({} if name is None else {"graph": name})
    yield Job(program.name, (program, values), options, path)


def _operator_jobs(args: argparse.Namespace) -> Iterator[Job]:
    """The searches for an operator, one for each number of features."""
    from sparsetir.data.sparse_tensor import SparseMatrix
    from sparsetir.schedules.operators.registry import OPERATORS
    from sparsetir.tuning.search import OperatorOptions

    op = args.program
    _check_operator(args)
    _check_device(args)
    none = op in WITHOUT or op in OPERATORS and OPERATORS[op].vectors
    feats = args.feat or [None if none else 32]
    if len(set(feats)) != len(feats):
        raise UsageError("argument --feat: expected each size once")
    name, matrix = (arguments.relations if op == "rgms" else arguments.graph)(args.graph)
    options = {**_given(args, OperatorOptions), "graph": name}
    for feat in feats:
        second: Any = feat
        if op == "spgemm":
            matrix = SparseMatrix(matrix)
            second = matrix if matrix.shape[0] == matrix.shape[1] else matrix.T
        several = feat if len(feats) > 1 else None
        path = report_path(args.report, f"{op}-{name}-{feat or 1}", several)
        yield Job(op if feat is None else f"{op} {feat}", (op, matrix, second), options, path)


def _given(args: argparse.Namespace, options: type) -> dict[str, Any]:
    """The options of `tune` that were given, or have a default here."""
    names = options.__annotations__.keys() - {"graph", "modules"}
    return {n: x for n, x in vars(args).items() if n in names and x is not None}


def _check_operator(args: argparse.Namespace) -> None:
    """Raise for options that do not apply to an operator."""
    op = args.program
    arguments.refuse(
        {name: getattr(args, name) for name in ("arg", "schedule", "space")}, "an operator"
    )
    from sparsetir.planning.plan import record_of

    takes = record_of("copy_e" if is_message(op) else op).options
    refused = [name for name in ("feat_in", "weighted", "edge_feat") if name not in takes]
    refused += ["feat"] * (op in WITHOUT)
    arguments.refuse({name: getattr(args, name) for name in refused}, op)


def _check_device(args: argparse.Namespace) -> None:
    """Raise if there is no device to measure on."""
    import tvm

    from sparsetir.cli.doctor import gpu
    from sparsetir.schedules.targets import resolve_target

    kind = resolve_target(args.target).kind.name
    if args.remote is not None or kind == "llvm" or tvm.runtime.device(kind, 0).exist:
        return
    why = f": {gpu()['reason']}" if kind == "cuda" else ""
    raise Failed(f"argument --target: there is no {kind} device here{why}; see --remote")


def report_path(option: Path | None, what: str, feat: int | None = None) -> Path:
    """The path of a search's report.

    option : a file, which is replaced, with `feat` added to its name; or a folder; None for the
        current one
    what : name of a file in a folder; a free number is added rather than replace an existing file
    feat : number of features, if there are several searches
    """
    if option is not None and not option.is_dir():
        return option if feat is None else option.with_stem(f"{option.stem}-{feat}")
    stem, folder = f"sparsetir-tune-{re.sub(r'[^A-Za-z0-9_.]+', '-', what)}", option or Path()
    paths = (folder / f"{stem}{f'-{n}' if n > 1 else ''}.html" for n in count(1))
    return next(path for path in paths if not path.exists())


def _print_results(
    args: argparse.Namespace, tuned: Search, name: str, where: Path | None, path: Path
) -> tuple[dict[str, object], int]:
    """Print the results and write the report; return data for JSON and the exit code."""
    from sparsetir.tuning.report import table

    if not args.json:
        print(table(tuned, graph=name, records=where))
    report, wants_report = None, bool(tuned.trials) and not args.no_report
    if wants_report:
        report = _report(tuned, path, name)
        if report is not None and not args.json:
            print(f"report: {report}")
    data = _data(tuned) | {"interrupted": tuned.interrupted, "report": report}
    failed = "ok" not in tuned.counts
    failed |= args.report is not None and wants_report and report is None
    return data, INTERRUPTED if tuned.interrupted else int(failed)


def _report(tuned: Search, path: Path, name: str) -> str | None:
    """Write the report and return its path; None if that fails, as without matplotlib."""
    try:
        from sparsetir.tuning.report import write_report

        return str(write_report(tuned, path, graph=name))
    except (ImportError, OSError) as error:
        print(f"sparsetir tune: no report: {error}", file=sys.stderr)
        return None


def _data(tuned: Search) -> dict[str, object]:
    """The result of a search as data for JSON."""
    from sparsetir.schedules.search.configs import to_data
    from sparsetir.tuning.report import ranked

    def data(trial: Trial) -> dict[str, object]:
        costs = {name: getattr(trial.outcome, name) for name in COSTS}
        return {"config": to_data(trial.config), **costs}

    best = ranked(tuned)[:5]
    failed = {t.number: f"{t.outcome.state}: {t.outcome.message}" for t in tuned.failures}
    return {
        "feat": tuned.key.feat, "dtype": tuned.key.dtype, "threads": tuned.task.threads,
        "target": tuned.key.target, "device": tuned.key.device, "trials": len(tuned.trials),
        "counts": tuned.counts, "failures": failed, "warnings": tuned.warnings,
        "default": {"config": to_data(tuned.default), "seconds": tuned.default_seconds},
        "best": [data(trial) for trial in best], "speedup": tuned.speedup if best else None,
        "importances": tuned.importances,
    }  # fmt: skip


def _remote(text: str) -> object:
    from sparsetir.extras import need

    host, _, rest = text.partition(":")
    port, _, key = rest.partition(":")
    if not (host and port.isdecimal() and key):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT:KEY, got {text!r}")
    remote = need("argument --remote", "sparsetir.tuning.remote")
    return remote.Remote(host, int(port), key)
