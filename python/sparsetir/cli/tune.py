"""`sparsetir tune`: search for an operator on a graph, or for a function with arguments."""

from __future__ import annotations

import argparse
import os
import re
import sys
from itertools import count
from pathlib import Path
from typing import Any

from sparsetir.cli import arguments
from sparsetir.cli.arguments import REDUCTIONS, Failed, Parser, UsageError, number
from sparsetir.cli.functions import function_of, is_file, operator_named, schedule_of
from sparsetir.planning.vocabulary import is_message
from sparsetir.schedules.operators.names import DTYPES, NAMED, SOFTMAX

INTERRUPTED = 130
MOST_SECONDS = 10**8
WITHOUT = (*SOFTMAX, "spgemm")  # a number of features

EPILOG = """\
A graph is cora, an .npz file (file.npz:layer for one of several matrices), .mtx, an edge list
(.txt, .csv, .tsv, .el), or a folder of PyG or DGL; ":T" behind it transposes. For rgms it is an
.npz file with relations: num_nodes, src, dst and etype. spgemm multiplies it with itself, or with
its transpose where it is no square.

Messages and their reduction have DGL's names: u_add_e_max, copy_u_mean, u_mul_e_sum and so on, also
with "add", "amax" and "amin" for the reduction; u_dot_v is sddmm.

Each feature size is a search of its own. Results are kept (`sparsetir records list`), and plans of
the same operator and pattern use them by themselves; a search that was stopped goes on where it
was. The report is written to sparsetir-tune-OP-GRAPH-FEAT.html in this folder, or, where that is
there already, with -2, -3 and so on behind FEAT; a file named by --report is replaced.

A function in a file is tuned with the arguments that are named: numbers, .npy files, or arrays of
.npz files (file.npz:key; without a key that of the parameter's name). Sizes that shapes imply, and
outputs, may be left out. Without --schedule its iterations are tiled; --space then replaces some of
the choices.

examples:
  sparsetir tune spmm --graph cora --feat 32 128 --trials 64
  sparsetir tune sddmm --graph edges.csv --seconds 120 --workers 2 --threads 1
  sparsetir tune spmm --graph weights.npz:conv1 --target '{"kind": "cuda", "arch": "sm_90"}'
  sparsetir tune spmm --graph ~/data/Cora --json > tuned.json
  sparsetir tune rgms --graph aifb.npz --feat 16 --feat-in 32 --unweighted
  sparsetir tune attention --graph cora --feat 64 --heads 8
  sparsetir tune u_add_e_max --graph cora --feat 32 --edge-feat 32
  sparsetir tune program.py:two_hop --arg x=x.npy --arg indptr=a.npz --arg indices=a.npz
  sparsetir tune program.py --arg a=a.npz:data --schedule fast.py:apply --space '{"tile": [1, 2]}'

How long other libraries take, a checkout tells: python -m bench run --op spmm --graph mine.npz
"""


def add(out: Parser) -> None:
    """Add the arguments."""
    what = f"{', '.join(NAMED)}, a message, or file.py[:function]"
    out.add_argument("op", metavar="OP|FILE", help=what)
    of_op = out.add_argument_group("of an operator")
    of_op.add_argument("--graph", help="see below")
    number(of_op, "--feat", 1, "feature sizes (default: 32)", nargs="+", metavar="N")
    of_op.add_argument("--dtype", choices=DTYPES, help="default: that of the graph, float32")
    of_op.add_argument("--reduce", choices=REDUCTIONS, help="default: sum")
    number(of_op, "--heads", 1, "how many matrices share the pattern")
    given = "of rgms and attention: features of X, of queries and keys (default: as --feat)"
    number(of_op, "--feat-in", 1, given, metavar="N")
    given = "of messages: features of each edge, 1 or as --feat (default: values of the graph)"
    number(of_op, "--edge-feat", 1, given, metavar="N")
    given = "of rgms: all values are one"
    of_op.add_argument("--unweighted", action="store_true", default=None, help=given)
    of_file = out.add_argument_group("of a function in a file")
    given = "of a parameter; once for each"
    of_file.add_argument("--arg", action="append", metavar="NAME=VALUE", help=given)
    of_file.add_argument("--schedule", metavar="FILE:NAME", help="function (sch, config) in a file")
    given = "lists of choices by name"
    of_file.add_argument("--space", type=arguments.mapping, metavar="JSON", help=given)
    arguments.add_target(out)
    number(out, "--threads", 1, "of the CPU (default: all)", most=2**16)
    search = out.add_argument_group("search")
    number(search, "--trials", 1, "configs to measure", default=64)
    number(search, "--seconds", 0.001, "stop after this time", float, MOST_SECONDS)
    given = "auto: exhaustive where there are no more configs than trials, else tpe"
    samplers = ("auto", "tpe", "random", "exhaustive")
    search.add_argument("--sampler", choices=samplers, default="auto", help=given)
    number(search, "--seed", 0, "of the sampler", default=0)
    number(search, "--workers", 1, "that measure side by side", default=1)
    given = "do not begin with configs of similar graphs"
    search.add_argument("--no-transfer", action="store_true", help=given)
    given = "with templates of your own"
    search.add_argument("--modules", nargs="+", default=[], metavar="NAME", help=given)
    measuring = out.add_argument_group("measuring")
    limit: dict[str, Any] = {"default": 60.0, "metavar": "SECONDS"}
    number(measuring, "--time-limit", 0.001, "of each config", float, MOST_SECONDS, **limit)
    given = "of each config, such as 4G"
    measuring.add_argument("--memory-limit", type=arguments.size, metavar="SIZE", help=given)
    given = "a device, by TVM's RPC tracker"
    measuring.add_argument("--remote", type=_remote, metavar="HOST:PORT:KEY", help=given)
    kept = out.add_argument_group("results")
    kept.add_argument("--records", metavar="PATH", help='where they are kept; "" keeps none')
    given = "database for the trials of many machines, as postgresql+psycopg://user@host/name"
    kept.add_argument("--storage", metavar="URL", help=given)
    report = kept.add_mutually_exclusive_group()
    report.add_argument("--report", type=Path, metavar="PATH", help="HTML file, or a folder")
    report.add_argument("--no-report", action="store_true", help="write no HTML file")
    arguments.add_json(kept)


def run(args: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    from sparsetir.records.records import Records

    if is_file(args.op):
        return run_program(args)
    _check_operator(args)
    if args.graph is None:
        raise UsageError(f"argument --graph: expected one, for {args.op}")
    _check_device(args)
    feats = args.feat or [None if args.op in (*WITHOUT, "spmv") else 32]
    if len(set(feats)) != len(feats):
        raise UsageError("argument --feat: expected each size once")
    related = args.op == "rgms"
    name, matrix = (arguments.relations if related else arguments.graph)(args.graph)
    where = None if args.records == "" else Records(args.records).path
    runs, codes = [], [0]
    for feat in feats:
        if runs and not args.json:
            print()
        found, code = _search(args, name, matrix, feat, where)
        runs.append(found)
        codes.append(code)
        if found["interrupted"]:
            break
    if args.json:
        kept = None if where is None else str(where)
        arguments.print_json({"op": args.op, "graph": name, "records": kept, "runs": runs})
    return max(codes)


def _check_operator(args: argparse.Namespace) -> None:
    """Raise for what is no operator, and for options that are not for it."""
    op, messages = args.op, is_message(args.op)
    if not messages and op not in (*NAMED, "u_dot_v") and not operator_named(op):
        raise UsageError(
            f"argument OP|FILE: expected {', '.join(NAMED)}, a message such as u_add_e_max or "
            f"copy_u_mean, u_dot_v, or a .py file, got {op!r}"
        )
    for name in ("arg", "schedule", "space"):
        if getattr(args, name) is not None:
            raise UsageError(f"argument --{name}: expected none for an operator")
    from sparsetir.planning.plan import record_of

    takes = record_of("copy_e" if messages else op).options
    options = {"feat_in": "feat_in", "unweighted": "weighted", "edge_feat": "edge_feat"}
    refused = [name for name, option in options.items() if option not in takes]
    for name in [*refused, *["feat"] * (op in WITHOUT)]:
        if getattr(args, name) is not None:
            raise UsageError(f"argument --{name.replace('_', '-')}: expected none for {op}")


def _check_device(args: argparse.Namespace) -> None:
    """Raise where there is nothing here to measure on."""
    import tvm

    from sparsetir.cli.doctor import gpu
    from sparsetir.runtime.targets import resolve_target

    kind = resolve_target(args.target).kind.name
    if args.remote is not None or kind == "llvm" or tvm.runtime.device(kind, 0).exist:
        return
    why = f": {gpu()['reason']}" if kind == "cuda" else ""
    raise Failed(f"argument --target: there is no {kind} device here{why}; see --remote")


def report_path(given: Path | None, op: str, graph: str, feat: int, several: bool) -> Path:
    """Where the report of a search goes.

    given : a file, which is replaced and gets the feature size into its name where there are
        several; or a folder; None for a name of its own in the current folder. Files with such a
        name are not replaced: the next free number is put behind it
    """
    if given is not None and not given.is_dir():
        return given.with_stem(f"{given.stem}-{feat}") if several else given
    return free_path(given, f"{op}-{re.sub(r'[^A-Za-z0-9_.]+', '-', graph)}-{feat}")


def free_path(folder: Path | None, what: str) -> Path:
    """A name for a report in a folder, by default this one, that no file has yet."""
    stem = f"sparsetir-tune-{what}"
    names = (f"{stem}{f'-{n}' if n > 1 else ''}.html" for n in count(1))
    return next(path for path in ((folder or Path()) / name for name in names) if not path.exists())


def run_program(args: argparse.Namespace) -> int:
    """Tune a function of a file; the exit code."""
    from sparsetir.records.records import Records
    from sparsetir.tuning.search import tune

    names = "graph", "feat", "feat_in", "edge_feat", "unweighted", "dtype", "reduce", "heads"
    for name in (*names, "remote", "modules"):
        if getattr(args, name):
            option = name.replace("_", "-")
            raise UsageError(f"argument --{option}: expected none for a function in a file")
    _check_device(args)
    where = None if args.records == "" else Records(args.records).path
    given = arguments.named_values(args.arg or [])
    schedule = None if args.schedule is None else schedule_of(args.schedule)
    program = function_of(args.op)
    tuned = tune(
        program, given, schedule=schedule, space=args.space, **_searching(args, program.name)
    )
    path = args.report
    if path is None or path.is_dir():
        path = free_path(path, program.name)
    found, code = _tell(args, tuned, "", where, path)
    if args.json:
        kept = None if where is None else str(where)
        arguments.print_json({"program": args.op, "records": kept, "runs": [found]})
    return code


def _searching(args: argparse.Namespace, title: str) -> dict[str, Any]:
    """Options of `tune`, whatever is tuned."""
    from sparsetir.tuning.progress import Bar

    names = ("target", "threads", "trials", "seconds", "sampler", "seed", "workers", "records")
    found = {n: getattr(args, n) for n in (*names, "storage", "time_limit", "memory_limit")}
    bar = Bar(title, seconds=args.seconds)
    return {**found, "transfer": not args.no_transfer, "progress": bar}


def _search(
    args: argparse.Namespace, name: str, matrix: object, feat: int | None, where: Path | None
) -> tuple[dict[str, object], int]:
    """Search for one feature size and tell what was found; data for JSON and the exit code."""
    from sparsetir.data.sparse_tensor import SparseMatrix
    from sparsetir.tuning.search import tune

    if args.modules:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
    title = args.op if feat is None else f"{args.op} {feat}"
    second: Any = feat
    if args.op == "spgemm":
        matrix = SparseMatrix(matrix)
        second = matrix if matrix.shape[0] == matrix.shape[1] else matrix.T
    tuned = tune(
        args.op, matrix, second, dtype=args.dtype, reduce=args.reduce or "sum",
        heads=args.heads, graph=name, remote=args.remote, modules=args.modules,
        feat_in=args.feat_in, weighted=not args.unweighted, edge_feat=args.edge_feat,
        **_searching(args, title),
    )  # fmt: skip
    several = len(args.feat or [feat]) > 1
    path = report_path(args.report, args.op, name, feat or 1, several)
    return _tell(args, tuned, name, where, path)


def _tell(
    args: argparse.Namespace, tuned: Any, name: str, where: Path | None, path: Path
) -> tuple[dict[str, Any], int]:
    """Print what was found and write the report; data for JSON and the exit code."""
    from sparsetir.tuning.report import table

    ran = any(t.outcome.state == "ok" for t in tuned.trials)
    if not args.json:
        print(table(tuned, graph=name, records=where))
    report, written = None, True
    if tuned.trials and not args.no_report:
        report, written = _report(tuned, path, name)
        if report is not None and not args.json:
            print(f"report: {report}")
    data = _data(tuned) | {"interrupted": tuned.interrupted, "report": report}
    code = (
        INTERRUPTED
        if tuned.interrupted
        else int(not ran or (args.report is not None and not written))
    )
    return data, code


def _report(tuned: Any, path: Path, name: str) -> tuple[str | None, bool]:
    """The report that was written, and whether it was; without matplotlib there is none."""
    try:
        from sparsetir.tuning.html import write_report

        return str(write_report(tuned, path, graph=name)), True
    except (ImportError, OSError) as error:
        print(f"sparsetir tune: no report: {error}", file=sys.stderr)
        return None, False


def _data(tuned: Any) -> dict[str, Any]:
    """For JSON."""
    from sparsetir.schedules.search.configs import to_data
    from sparsetir.tuning.report import ranked

    def data(trial: Any) -> dict[str, Any]:
        outcome = trial.outcome
        names = ("seconds", "median", "compile_seconds", "convert_seconds", "padding", "bytes")
        return {"config": to_data(trial.config)} | {n: getattr(outcome, n) for n in names}

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
    from sparsetir.tuning.remote import Remote

    host, _, rest = text.partition(":")
    port, _, key = rest.partition(":")
    if not (host and port.isdecimal() and key):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT:KEY, got {text!r}")
    return Remote(host, int(port), key)
