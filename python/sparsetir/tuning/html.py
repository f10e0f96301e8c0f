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
from sparsetir.formats import Format
from sparsetir.runtime.file_errors import write_whole
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.tuning import charts
from sparsetir.tuning.progress import duration, micros
from sparsetir.tuning.report import Row, counts, memory, note, padding, rows, short, times
from sparsetir.tuning.tuned import Search, Tuned, TunedProgram

MOST_FAILURES = 50  # that are shown in full
TEMPLATE = "report.html.jinja"


def write_report(tuned: Search, path: Path | str, *, graph: str = "") -> Path:
    """Write a page about a search; needs matplotlib and Jinja2.

    path : replaced by the whole page or, where that fails, left as it was
    graph : the name of what was tuned for

    Raises ImportError without these packages, OSError where the file cannot be written.
    """
    need("write_report", "matplotlib", "tune")
    need("write_report", "jinja2", "tune", title="Jinja2")
    path = Path(path)
    text = _page(tuned, graph)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return path


def _page(tuned: Search, graph: str) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "counts": counts,
        "duration": duration,
        "memory": memory,
        "padding": padding,
        "short": short,
        "times": times,
        "micros": lambda seconds: micros(seconds) if seconds else "-",
    }
    found = rows(tuned)
    best = found[0] if found else None
    return environment.get_template(TEMPLATE).render(
        title=tuned.task.title(graph), tuned=tuned, rows=found, best=best, note=note(tuned),
        most_failures=MOST_FAILURES, history=_history(tuned), importances=_importances(tuned),
        subject=_subject(tuned, best, graph), environment=_environment(tuned),
    )  # fmt: skip


def _drawn(image: str) -> object:
    """A chart, which is not to be escaped."""
    from markupsafe import Markup

    return Markup(image)


def _history(tuned: Search) -> object:
    if not tuned.trials:
        return ""
    default = next((t for t in tuned.trials if t.config == tuned.default), None)
    return _drawn(charts.history(tuned.trials, default.outcome.seconds if default else None))


def _importances(tuned: Search) -> object:
    found = {n: v for n, v in tuned.importances.items() if v > 0}
    return _drawn(charts.importances(found)) if found else ""


def _subject(tuned: Search, best: Row | None, graph: str) -> dict[str, object]:
    """What was tuned, by titles: the function and its schedule, or the matrix and its storage."""
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


def _code(text: str) -> object:
    from markupsafe import Markup

    return Markup("<pre>{}</pre>").format(text)


def _storage(tuned: Tuned, best: Row, graph: str) -> object:
    stored = getattr(best.config, "format", None)
    if isinstance(stored, Format):
        return _drawn(charts.picture_of_format(tuned.task.matrix, stored, graph))
    size = memory(best.trial.outcome.bytes)
    return f"In the layout of {type(best.config).__name__}: {size}, {padding(best.trial)} padding."


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
