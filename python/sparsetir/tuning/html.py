"""What a search found, as a page: one file that needs nothing else, with charts and pictures."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import Any

import tvm

import sparsetir
from sparsetir.extras import need
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.tuning import charts
from sparsetir.tuning.compare import DEFAULT, TITLES, Comparison
from sparsetir.tuning.files import write_whole
from sparsetir.tuning.progress import duration, micros
from sparsetir.tuning.report import (
    Summary,
    counts,
    memory,
    notes,
    padding,
    short,
    summarise,
    times,
)
from sparsetir.tuning.style import STYLE
from sparsetir.tuning.task import OK, PRUNED
from sparsetir.tuning.tuned import Search, Trial, Tuned, TunedProgram

__all__ = ["write_report"]

MOST_FAILURES = 50  # that are shown in full


def write_report(
    tuned: Search, comparison: Comparison | None, path: Path | str, *, graph: str = ""
) -> Path:
    """Write a page about a search; needs matplotlib.

    comparison : None where there was none, as after Ctrl-C
    path : replaced by the whole page or, where that fails, left as it was
    graph : the name of what was tuned for

    Raises ImportError without matplotlib, OSError where the file cannot be written.
    """
    need("write_report", "matplotlib", "tune")
    path = Path(path)
    text = _page(tuned, comparison, graph)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return path


def _page(tuned: Search, comparison: Comparison | None, graph: str) -> str:
    summary = summarise(tuned, comparison)
    title = tuned.task.title(graph)
    parts = [
        _summary(tuned, summary),
        _section("Best configs", _best(tuned, summary)),
        _section("Beside the libraries", _beside(summary, comparison)),
        _section("Search history", _history(tuned)),
        _section("Parameter importance", _importance(tuned)),
        *_subject(tuned, summary),
        _section("Failures", _failures(tuned.failures)),
        _section("All trials", _all(tuned)),
        _section("Environment", _environment(tuned)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main><h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</main></body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _p(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[int] = ()) -> str:
    """Columns of numbers, but for the first and those in `text`."""

    def cell(tag: str, at: int, value: str) -> str:
        kind = "" if at == 0 or at in text else ' class="number"'
        return f"<{tag}{kind}>{escape(value)}</{tag}>"

    lines = ["".join(cell("th", i, v) for i, v in enumerate(head))]
    lines += ["".join(cell("td", i, v) for i, v in enumerate(row)) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines[1:])
    return (
        f'<div class="wide"><table><thead><tr>{lines[0]}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _summary(tuned: Search, summary: Summary) -> str:
    best = summary.best
    if best is None:
        tiles = _p("No config worked.", "trouble")
    else:
        shown = [("best", micros(best.seconds))]
        if best.over_default is not None:
            shown.append(("speed of the default", f"{best.over_default:.2f}x"))
        if best.over_vendor is not None and summary.vendor is not None:
            name = f"speed of the fastest library, {summary.vendor[0]}"
            shown.insert(0, (name, f"{best.over_vendor:.2f}x"))
        tiles = "".join(
            f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
            for name, value in shown
        )
        tiles = f'<div class="tiles">{tiles}</div><p><code>{escape(short(best.config))}</code></p>'
    warnings = "".join(_p(text, "trouble") for text in tuned.warnings)
    return f"<section>{tiles}{_p(counts(tuned))}{warnings}</section>"


def _best(tuned: Search, summary: Summary) -> str:
    if not summary.rows:
        return ""
    vendor = summary.vendor[0] if summary.vendor else None
    beside = [f"× {vendor}"] if vendor else []
    rows = []
    for row in summary.rows:
        size, took = None, [None, None]
        if row.trial is not None:
            outcome = row.trial.outcome
            size, took = outcome.bytes, [outcome.convert_seconds, outcome.compile_seconds]
        rows.append([
            row.name, short(row.config), micros(row.seconds), times(row.over_default),
            *([times(row.over_vendor)] if vendor else []),
            padding(row.trial), memory(size), *("-" if s is None else micros(s) for s in took),
        ])  # fmt: skip
    head = ["", "config", "time", "× default", *beside, "padding", "memory", "convert", "compile"]
    note = "Memory is that of the arranged matrix, padding the share of its places without element."
    kept = "".join(_p(text, "note") for text in notes(tuned, summary))
    return _table(head, rows, text=[1]) + kept + _p(note, "note")


def _beside(summary: Summary, comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    shown = {}
    if summary.best is not None:
        shown["best"] = (summary.best.seconds, "best")
    if summary.default is not None:
        shown[DEFAULT] = (summary.default.seconds, "ours")
    for name, seconds in sorted(summary.libraries.items(), key=lambda item: item[1]):
        shown[name] = (seconds, "other")
    troubles = [
        f"{TITLES.get(name, name)} {kind}: {why}"
        for kind in ("missing", "wrong", "failed")
        for name, why in getattr(comparison, kind).items()
    ]
    text = "".join(_p(text, "note") for text in troubles)
    return (charts.bars(shown) if shown else "") + text


def _history(tuned: Search) -> str:
    if not tuned.trials:
        return _p("There were no trials.")
    default = next((t for t in tuned.trials if t.config == tuned.default), None)
    return charts.history(tuned.trials, default.outcome.seconds if default else None)


def _importance(tuned: Search) -> str:
    found = {n: v for n, v in tuned.importances.items() if v > 0}
    if not found:
        return _p("Too few trials worked to tell.")
    return charts.importances(found)


def _subject(tuned: Search, summary: Summary) -> list[str]:
    """What was tuned: the matrix and its storage, or the function."""
    if isinstance(tuned, TunedProgram):
        return [
            _section("The function", f"<pre>{escape(tuned.task.program.script())}</pre>"),
            _section("Its best schedule", _schedule(tuned, summary)),
        ]
    assert isinstance(tuned, Tuned)
    return [
        _section("The matrix", charts.picture_of_pattern(tuned.task.matrix)),
        _section("How it is stored", _storage(tuned, summary)),
    ]


def _schedule(tuned: TunedProgram, summary: Summary) -> str:
    """What the best config makes of the function, over coordinates."""
    if summary.best is None or not summary.best.config:
        return _p("The default one.") if summary.best else ""
    sch = Schedule(tuned.task.program)
    tuned.task.apply()(sch, dict(summary.best.config))
    return f"<pre>{escape(sch.func.script())}</pre>"


def _storage(tuned: Tuned, summary: Summary) -> str:
    if summary.best is None:
        return ""
    config, trial = summary.best.config, summary.best.trial
    fmt = charts.format_of(config)
    if fmt is not None:
        return charts.picture_of_format(tuned.task.matrix, fmt)
    size = memory(trial.outcome.bytes if trial else None)
    return _p(f"In the layout of {type(config).__name__}: {size}, {padding(trial)} padding.")


def _failures(failures: Sequence[Trial]) -> str:
    if not failures:
        return _p("There were none.")
    rows = [
        [str(t.number), t.outcome.state, short(t.config), t.outcome.message]
        for t in failures[:MOST_FAILURES]
    ]
    more = len(failures) - len(rows)
    note = _p(f"and {more} more, among all trials below") if more else ""
    return _table(["trial", "state", "config", "message"], rows, text=[1, 2, 3]) + note


def _all(tuned: Search) -> str:
    rows = [
        [
            str(t.number), t.outcome.state,
            micros(t.outcome.seconds) if t.outcome.seconds else "-",
            padding(t), duration(t.when), short(t.config),
            "" if t.outcome.state in (OK, PRUNED) else t.outcome.message,
        ]
        for t in tuned.trials
    ]  # fmt: skip
    head = ["trial", "state", "time", "padding", "after", "config", "message"]
    body = _table(head, rows, text=[1, 5, 6])
    shown = f"<details><summary>show {len(rows)}</summary>{body}</details>"
    return shown if rows else ""


def _environment(tuned: Search) -> str:
    key = tuned.key
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    rows: list[tuple[str, Any]] = [
        ("device", key.device), ("target", key.target),
        *([("threads", tuned.task.threads)] if key.threads else []),
        ("data", key.fingerprint), ("sparsetir", sparsetir.__version__),
        ("TVM", tvm.__version__), ("Python", platform.python_version()), ("written", now),
    ]  # fmt: skip
    cells = "".join(f"<dt>{escape(n)}</dt><dd>{escape(str(v))}</dd>" for n, v in rows)
    return f"<dl>{cells}</dl>"
