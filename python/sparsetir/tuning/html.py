"""The report of a search: a page in one file, with charts and pictures."""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import tvm

from sparsetir import _versions
from sparsetir.extras import need
from sparsetir.formats import Format
from sparsetir.runtime.file_errors import write_whole
from sparsetir.runtime.texts import Section, aligned, as_html, duration, memory, micros
from sparsetir.schedules.template import Choices
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.tuning import charts
from sparsetir.tuning.report import Row, counts, note, padding, rows, short, times
from sparsetir.tuning.tuned import Search, Trial, Tuned, TunedProgram, TunedSparse

MOST_FAILURES = 50  # that are shown in full
HEADS = ("", "time", "x default", "padding", "memory", "convert", "compile", "config")
MEMORY = "Memory is that of the arranged matrix, padding the share of slots that hold no nonzero."


def write_report(tuned: Search, path: Path | str, *, graph: str = "") -> Path:
    """Write a page about a search; needs matplotlib.

    path : replaced by the whole page or, where that fails, left as it was
    graph : the name of what was tuned for

    Raises ImportError without it, OSError where the file cannot be written.
    """
    need("write_report", "matplotlib", "tune")
    path = Path(path)
    text = _page(tuned, graph)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return path


def _page(tuned: Search, graph: str) -> str:
    found = rows(tuned)
    best = found[0] if found else None
    text = ["No config worked."] if best is None else [_headline(best), short(best.config)]
    sections = [Section("Result", [*text, counts(tuned), *tuned.warnings])]
    if found:
        table = [
            [r.name, micros(r.seconds), times(r.over_default), *_costs(r.trial), short(r.config)]
            for r in found
        ]
        told = [x for x in (note(tuned), MEMORY) if x]
        sections.append(Section("Best configs", told, HEADS, table))
    history = _history(tuned)
    text = [] if history else ["There were no trials."]
    sections.append(Section("Search history", text, picture=history))
    importances = {n: v for n, v in tuned.importances.items() if v > 0}
    drawn = charts.importances(importances) if importances else ""
    text = [] if drawn else ["Too few trials worked to tell."]
    sections.append(Section("Parameter importance", text, picture=drawn))
    sections += _subject(tuned, best, graph)
    failed = [
        (t.number, t.outcome.state, short(t.config), t.outcome.message) for t in tuned.failures
    ]
    text = [] if failed else ["There were none."]
    if len(failed) > MOST_FAILURES:
        text = [f"The first {MOST_FAILURES} of {len(failed)}."]
    heads = ("trial", "state", "config", "message")
    sections.append(Section("Failures", text, heads, failed[:MOST_FAILURES]))
    if tuned.trials:
        shown = f"show {len(tuned.trials)}", "\n".join(aligned(_all_trials(tuned)))
        sections.append(Section("All trials", folded=[shown]))
    sections.append(Section("Environment", rows=list(_environment(tuned).items())))
    return as_html(tuned.task.title(graph), sections)


def _headline(best: Row) -> str:
    over = best.over_default
    beside = "" if over is None else f", {times(over)}x speed of the default"
    return f"best: {micros(best.seconds)}{beside}"


def _costs(trial: Trial) -> list[str]:
    outcome = trial.outcome
    seconds = map(micros, (outcome.convert_seconds, outcome.compile_seconds))
    return [padding(trial), memory(outcome.bytes), *seconds]


def _all_trials(tuned: Search) -> list[list[str]]:
    found = [["trial", "state", "time", "padding", "after", "config", "message"]]
    for t in tuned.trials:
        told = [t.outcome.state, micros(t.outcome.seconds), padding(t), duration(t.when)]
        found.append([str(t.number), *told, short(t.config), t.outcome.message])
    return found


def _history(tuned: Search) -> str:
    if not tuned.trials:
        return ""
    default = next((t for t in tuned.trials if t.config == tuned.default), None)
    return charts.history(tuned.trials, default.outcome.seconds if default else None)


def _subject(tuned: Search, best: Row | None, graph: str) -> list[Section]:
    """Sections on the function and its schedule, or the matrix and its storage."""
    if isinstance(tuned, TunedProgram):
        found = [Section("The function", code=tuned.task.program.script())]
        config: Any = None if best is None else best.config
        if config:  # what it makes of the function, over coordinates
            sch = Schedule(tuned.task.program)
            tuned.task.apply()(sch, dict(config) if isinstance(config, Choices) else config)
            found.append(Section("Its best schedule", code=sch.func.script()))
        elif best is not None:
            found.append(Section("Its best schedule", ["The default one."]))
        return found
    assert isinstance(tuned, Tuned | TunedSparse)
    several = isinstance(tuned, TunedSparse)
    matrix = tuned.task.request.matrices.each[0] if several else tuned.task.matrix
    title = "How it is stored"
    found = [Section("The matrix", picture=charts.picture_of_pattern(matrix, graph))]
    if best is None:
        return found
    stored = getattr(best.config, "format", None)
    if isinstance(stored, Format):
        return [*found, Section(title, picture=charts.picture_of_format(matrix, stored, graph))]
    size, share = memory(best.trial.outcome.bytes), padding(best.trial)
    text = f"In the layout of {type(best.config).__name__}: {size}, {share} padding."
    return [*found, Section(title, [text])]


def _environment(tuned: Search) -> dict[str, object]:
    key = tuned.key
    return {
        "device": key.device,
        "target": key.target,
        **({"threads": tuned.task.threads} if key.threads else {}),
        "data": key.fingerprint,
        "sparsetir": _versions.VERSION,
        "TVM": tvm.__version__,
        "Python": platform.python_version(),
        "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
