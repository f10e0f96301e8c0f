"""`sparsetir records`: the records of tuning."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sparsetir.cli import arguments
from sparsetir.cli.arguments import Failed, Parser, UsageError
from sparsetir.runtime.file_errors import printable
from sparsetir.runtime.texts import aligned, fitted, many, micros

if TYPE_CHECKING:
    from sparsetir.records.record import Record
    from sparsetir.records.records import Records

EPILOG = """\
Records are in one file: --records PATH, else SPARSETIR_RECORDS, else sparsetir/records.sqlite in
XDG_CACHE_HOME or ~/.cache. SPARSETIR_RECORDS= (empty) switches them off.

examples:
  sparsetir records list
  sparsetir records export mine.json
  sparsetir records import theirs.json
  sparsetir records forget --graph cora --op spmm
"""


def add(out: Parser) -> None:
    """Add the arguments."""
    actions = out.add_subparsers(dest="action", metavar="ACTION", required=True)
    common = arguments.Parser(add_help=False)
    common.add_argument("--records", metavar="PATH", help="the file of records")
    arguments.add_json(common)
    arguments.add_modules(common)
    common.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
    chosen = arguments.Parser(add_help=False)
    chosen.add_argument("--op", metavar="NAME", help="a name from the list")
    chosen.add_argument("--graph", metavar="NAME", help="a name from the list")
    chosen.add_argument("--feat", type=arguments.at_least(1))
    parents = [common, chosen]
    actions.add_parser("list", parents=parents, help="show the best record of each problem")
    export = actions.add_parser("export", parents=[common], help="write all records to a JSON file")
    export.add_argument("file", type=Path)
    export.add_argument("--replace", action="store_true", help="replace an existing file")
    load = actions.add_parser("import", parents=[common], help="add the records of a JSON file")
    load.add_argument("file", type=Path)
    forget = actions.add_parser("forget", parents=parents, help="delete records, and their trials")
    forget.add_argument("--all", action="store_true", help="delete every record")


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    from sparsetir.records.records import RecordError, Records

    records = Records(args.records)
    if records.path is None:
        raise Failed("records are switched off (SPARSETIR_RECORDS is empty); give --records PATH")
    if args.records is not None and args.action != "import" and not records.path.exists():
        raise UsageError(f"argument --records: {args.records}: no such file")
    try:
        done = {"list": _list, "export": _export, "import": _import, "forget": _forget}
        return done[args.action](args, records)
    except RecordError as error:
        raise Failed(str(error)) from error


def _chosen(args: argparse.Namespace, records: Records) -> list[Record]:
    """The records that the options select."""

    def fits(record: Record) -> bool:
        key = record.key
        wanted = ((args.op, key.op), (args.graph, record.graph), (args.feat, key.feat))
        return all(want in (None, has) for want, has in wanted)

    return [record for record in records.all() if fits(record)]


def _list(args: argparse.Namespace, records: Records) -> int:
    from sparsetir.records.record import best_of_each, record_to_data

    chosen = _chosen(args, records)
    if args.json:
        data = [record_to_data(record) for record in chosen]
        arguments.print_json({"path": str(records.path), "records": data})
        return 0
    best = best_of_each(record for record in chosen if record.is_current)
    rows = [
        ["op", "graph", "feat", "dtype", "reduce", "threads", "time", "x default", "trials", "date"]
    ]
    configs = [""]
    for record in best.values():
        key, default = record.key, record.default_seconds
        gain = "-" if not default else f"{default / record.seconds:.2f}"
        threads = str(key.threads) if key.threads else "GPU"
        of_program = key.reduce.startswith("program-")
        feat, reduce = ("-", "-") if of_program else (str(key.feat), key.reduce)
        cells = [
            key.op, record.graph or key.fingerprint[:8], feat, key.dtype, reduce, threads,
            micros(record.seconds), gain, str(record.trials), record.date[:10],
        ]  # fmt: skip
        rows.append([printable(cell) for cell in cells])  # others may have written the file
        configs.append(printable(arguments.config_text(record.config)))
    for line, config in zip(aligned(rows), configs, strict=True) if best else ():
        print(line)
        if config:
            print(fitted(f"    {config}", 6))
    others = sum(not record.is_current for record in chosen)
    unused = f", {others} of other versions, which plans ignore" if others else ""
    print(f"{many(len(best), 'problem')}, {many(len(chosen), 'record')} in {records.path}{unused}")
    return 0


def _export(args: argparse.Namespace, records: Records) -> int:
    if args.file.exists() and not args.replace:
        raise Failed(f"{args.file} exists already; give another name, or --replace")
    count = records.export(args.file, replace=args.replace)
    return _print_count(args, f"{many(count, 'record')} written to {args.file}", count)


def _import(args: argparse.Namespace, records: Records) -> int:
    count = records.load(args.file)
    return _print_count(args, f"{many(count, 'new record')}, now in {records.path}", count)


def _forget(args: argparse.Namespace, records: Records) -> int:
    if not args.all and args.op is None and args.graph is None and args.feat is None:
        raise UsageError("forget: expected --op, --graph, --feat or --all")
    keys = {record.key for record in _chosen(args, records)}
    # A key has one pattern, whose records may have several display names.
    count = sum(records.forget(key) for key in keys)
    with suppress(ImportError):  # without Optuna no search continues the trials
        from sparsetir.tuning.search import forget_trials

        for key in keys:
            forget_trials(records, key)
    return _print_count(args, f"{many(count, 'record')} deleted from {records.path}", count)


def _print_count(args: argparse.Namespace, text: str, count: int) -> int:
    if args.json:
        arguments.print_json({"records": count})
    else:
        print(text)
    return 0
