"""What a search found, as a page: one file that needs nothing else, with charts and pictures.

`report.html.jinja` is the page; here are its charts and pictures.
"""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import tvm

from sparsetir import _versions
from sparsetir.extras import need
from sparsetir.records.files import write_whole
from sparsetir.records.task import Outcome
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.tuning import charts
from sparsetir.tuning.compare import DEFAULT, TITLES, Comparison
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
from sparsetir.tuning.tuned import Search, Tuned, TunedProgram

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
    environment.filters |= {
        "counts": counts, "duration": duration, "memory": memory, "padding": padding,
        "short": short, "times": times,
        "micros": lambda seconds: micros(seconds) if seconds else "-",
    }  # fmt: skip
    summary = summarise(tuned, comparison)
    return environment.get_template(TEMPLATE).render(
        title=tuned.task.title(graph), tuned=tuned, summary=summary, best=summary.best,
        vendor=summary.vendor and summary.vendor[0], comparison=comparison, titles=TITLES,
        notes=notes(tuned, summary), none_measured=Outcome(""), most_failures=MOST_FAILURES,
        bars=_bars(summary) if comparison else "", history=_history(tuned),
        importances=_importances(tuned), subject=_subject(tuned, summary, graph),
        environment=_environment(tuned),
    )  # fmt: skip


def _drawn(svg: str) -> Any:
    """A chart, which is not to be escaped."""
    from markupsafe import Markup

    return Markup(svg)


def _bars(summary: Summary) -> Any:
    shown = {}
    if summary.best is not None:
        shown["best"] = (summary.best.seconds, "best")
    if summary.default is not None:
        shown[DEFAULT] = (summary.default.seconds, "ours")
    for name, seconds in sorted(summary.libraries.items(), key=lambda item: item[1]):
        shown[name] = (seconds, "other")
    return _drawn(charts.bars(shown)) if shown else ""


def _history(tuned: Search) -> Any:
    if not tuned.trials:
        return ""
    default = next((t for t in tuned.trials if t.config == tuned.default), None)
    return _drawn(charts.history(tuned.trials, default.outcome.seconds if default else None))


def _importances(tuned: Search) -> Any:
    found = {n: v for n, v in tuned.importances.items() if v > 0}
    return _drawn(charts.importances(found)) if found else ""


def _subject(tuned: Search, summary: Summary, graph: str) -> dict[str, Any]:
    """What was tuned, by titles: the function and its schedule, or the matrix and its storage."""
    best = summary.best
    if isinstance(tuned, TunedProgram):
        schedule = "" if best is None else _schedule(tuned, best.config)
        return {"The function": _code(tuned.task.program.script()), "Its best schedule": schedule}
    assert isinstance(tuned, Tuned)
    return {
        "The matrix": _drawn(charts.picture_of_pattern(tuned.task.matrix, graph)),
        "How it is stored": "" if best is None else _storage(tuned, best, graph),
    }


def _schedule(tuned: TunedProgram, config: Any) -> Any:
    """What the best config makes of the function, over coordinates."""
    if not config:
        return "The default one."
    sch = Schedule(tuned.task.program)
    tuned.task.apply()(sch, dict(config))
    return _code(sch.func.script())


def _code(text: str) -> Any:
    from markupsafe import Markup

    return Markup("<pre>{}</pre>").format(text)


def _storage(tuned: Tuned, best: Row, graph: str) -> Any:
    fmt = charts.format_of(best.config)
    if fmt is not None:
        return _drawn(charts.picture_of_format(tuned.task.matrix, fmt, graph))
    size = memory(best.trial.outcome.bytes if best.trial else None)
    return f"In the layout of {type(best.config).__name__}: {size}, {padding(best.trial)} padding."


def _environment(tuned: Search) -> dict[str, Any]:
    key = tuned.key
    return {
        "device": key.device, "target": key.target,
        **({"threads": tuned.task.threads} if key.threads else {}),
        "data": key.fingerprint, "sparsetir": _versions.VERSION, "TVM": tvm.__version__,
        "Python": platform.python_version(),
        "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }  # fmt: skip
