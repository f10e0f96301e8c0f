"""What a search found, as a page: one file that needs nothing else, with charts and pictures.

`report.html.jinja` is the page; here is what it shows.
"""

from __future__ import annotations

import platform
from datetime import datetime, timezone
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
    Row,
    Summary,
    counts,
    memory,
    notes,
    padding,
    short,
    summarise,
    times,
)
from sparsetir.tuning.task import OK, PRUNED
from sparsetir.tuning.tuned import Search, Tuned, TunedProgram

__all__ = ["write_report"]

MOST_FAILURES = 50  # that are shown in full
TEMPLATE = "report.html.jinja"


def write_report(
    tuned: Search, comparison: Comparison | None, path: Path | str, *, graph: str = ""
) -> Path:
    """Write a page about a search; needs matplotlib and Jinja2.

    comparison : None where there was none, as after Ctrl-C
    path : replaced by the whole page or, where that fails, left as it was
    graph : the name of what was tuned for

    Raises ImportError without these packages, OSError where the file cannot be written.
    """
    need("write_report", "matplotlib", "tune")
    need("write_report", "jinja2", "tune", title="Jinja2")
    path = Path(path)
    text = _page(tuned, comparison, graph)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return path


def _page(tuned: Search, comparison: Comparison | None, graph: str) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["short"] = short
    summary = summarise(tuned, comparison)
    vendor = None if summary.vendor is None else summary.vendor[0]
    shown = {
        "title": tuned.task.title(graph), "tuned": tuned, "summary": summary,
        "tiles": _tiles(summary), "counts": counts(tuned), "remarks": notes(tuned, summary),
        "best_head": ["", "config", "time", "× default", *([f"× {vendor}"] if vendor else []),
                      "padding", "memory", "convert", "compile"],
        "best_rows": [_cells(row, vendor is not None) for row in summary.rows],
        "bars": _bars(summary) if comparison else "", "troubles": _troubles(comparison),
        "history": _history(tuned), "importances": _importances(tuned),
        **_subject(tuned, summary), "failures": _failures(tuned), "trials": _trials(tuned),
        "environment": _environment(tuned),
    }  # fmt: skip
    return environment.get_template(TEMPLATE).render(shown)


def _drawn(svg: str) -> Any:
    """A chart, which is not to be escaped."""
    from markupsafe import Markup

    return Markup(svg)


def _tiles(summary: Summary) -> list[tuple[str, str]]:
    """Names and values of what a reader wants first."""
    best = summary.best
    if best is None:
        return []
    tiles = [("best", micros(best.seconds))]
    if best.over_default is not None:
        tiles.append(("speed of the default", f"{best.over_default:.2f}x"))
    if best.over_vendor is not None and summary.vendor is not None:
        name = f"speed of the fastest library, {summary.vendor[0]}"
        tiles.insert(0, (name, f"{best.over_vendor:.2f}x"))
    return tiles


def _cells(row: Row, vendor: bool) -> list[str]:
    size, took = None, [None, None]
    if row.trial is not None:
        outcome = row.trial.outcome
        size, took = outcome.bytes, [outcome.convert_seconds, outcome.compile_seconds]
    return [
        row.name, short(row.config), micros(row.seconds), times(row.over_default),
        *([times(row.over_vendor)] if vendor else []),
        padding(row.trial), memory(size), *("-" if s is None else micros(s) for s in took),
    ]  # fmt: skip


def _bars(summary: Summary) -> Any:
    shown = {}
    if summary.best is not None:
        shown["best"] = (summary.best.seconds, "best")
    if summary.default is not None:
        shown[DEFAULT] = (summary.default.seconds, "ours")
    for name, seconds in sorted(summary.libraries.items(), key=lambda item: item[1]):
        shown[name] = (seconds, "other")
    return _drawn(charts.bars(shown)) if shown else ""


def _troubles(comparison: Comparison | None) -> list[str]:
    return [
        f"{TITLES.get(name, name)} {kind}: {why}"
        for kind in ("missing", "wrong", "failed")
        for name, why in getattr(comparison, kind, {}).items()
    ]


def _history(tuned: Search) -> Any:
    if not tuned.trials:
        return ""
    default = next((t for t in tuned.trials if t.config == tuned.default), None)
    return _drawn(charts.history(tuned.trials, default.outcome.seconds if default else None))


def _importances(tuned: Search) -> Any:
    found = {n: v for n, v in tuned.importances.items() if v > 0}
    return _drawn(charts.importances(found)) if found else ""


def _subject(tuned: Search, summary: Summary) -> dict[str, Any]:
    """What was tuned: the function and its schedule, or the matrix and its storage."""
    if isinstance(tuned, TunedProgram):
        schedule = "" if summary.best is None else _schedule(tuned, summary.best.config)
        return {"program": tuned.task.program.script(), "schedule": schedule}
    assert isinstance(tuned, Tuned)
    matrix = _drawn(charts.picture_of_pattern(tuned.task.matrix))
    return {"program": "", "matrix": matrix, "storage": _storage(tuned, summary)}


def _schedule(tuned: TunedProgram, config: Any) -> str:
    """What the best config makes of the function, over coordinates."""
    if not config:
        return "The default one."
    sch = Schedule(tuned.task.program)
    tuned.task.apply()(sch, dict(config))
    return sch.func.script()


def _storage(tuned: Tuned, summary: Summary) -> Any:
    if summary.best is None:
        return ""
    config, trial = summary.best.config, summary.best.trial
    fmt = charts.format_of(config)
    if fmt is not None:
        return _drawn(charts.picture_of_format(tuned.task.matrix, fmt))
    size = memory(trial.outcome.bytes if trial else None)
    return f"In the layout of {type(config).__name__}: {size}, {padding(trial)} padding."


def _failures(tuned: Search) -> list[list[str]]:
    return [
        [str(t.number), t.outcome.state, short(t.config), t.outcome.message]
        for t in tuned.failures[:MOST_FAILURES]
    ]


def _trials(tuned: Search) -> list[list[str]]:
    return [
        [
            str(t.number), t.outcome.state,
            micros(t.outcome.seconds) if t.outcome.seconds else "-",
            padding(t), duration(t.when), short(t.config),
            "" if t.outcome.state in (OK, PRUNED) else t.outcome.message,
        ]
        for t in tuned.trials
    ]  # fmt: skip


def _environment(tuned: Search) -> list[tuple[str, Any]]:
    key = tuned.key
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return [
        ("device", key.device), ("target", key.target),
        *([("threads", tuned.task.threads)] if key.threads else []),
        ("data", key.fingerprint), ("sparsetir", sparsetir.__version__),
        ("TVM", tvm.__version__), ("Python", platform.python_version()), ("written", now),
    ]  # fmt: skip
