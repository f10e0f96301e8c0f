"""Reports of a search: a table of the best configs, and a self-contained page."""

from __future__ import annotations

import base64
import io
import platform
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from datetime import datetime, timezone
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm

from sparsetir import _versions
from sparsetir.extras import need
from sparsetir.formats import Format
from sparsetir.records.task import OK, PRUNED, STATES, Config
from sparsetir.runtime.file_errors import write_whole
from sparsetir.runtime.texts import WIDTH, Section, aligned, as_html, duration, many, memory, micros
from sparsetir.schedules.template import Choices
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.tuning.tuned import Search, Trial, Tuned, TunedProgram, TunedSparse, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COUNT = 5  # best configs shown
MOST_FAILURES = 50  # failures shown in full
HEADS = ("", "time", "x default", "padding", "memory", "convert", "compile", "config")
ONE_CONFIG = "There is one config for this problem, the default: nothing to choose."
MEMORY = "Memory is that of the arranged matrix, padding the share of slots that hold no nonzero."
# Colours by Okabe and Ito, which the colour-blind can distinguish.
MEASURED, BEST, DEFAULT, FAILED = "#56b4e9", "#0072b2", "#e69f00", "#d55e00"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "image.interpolation": "none",  # keeps images small
}
INCHES = 10.5  # width of a chart
PIXELS = 96  # per inch, on a page
DPI = 130  # of an image that consists of pixels
MOST_TEXT = 150_000  # characters of an SVG; longer ones become pixels
MOST_BARS = 15


def ranked(tuned: Search) -> list[Trial]:
    """The successful trials of a search, one per config: the best one, then by time.

    Finalists, measured again at the end, come first, by these times.
    """
    trials_by_config: dict[Config, Trial] = {}
    best = [tuned.best] if OK in tuned.counts else []
    for trials in (best, tuned.finals, tuned.trials):
        worked = [t for t in trials if t.outcome.state == OK]
        for trial in sorted(worked, key=lambda t: (seconds(t), t.number)):
            trials_by_config.setdefault(trial.config, trial)
    return list(trials_by_config.values())


def short(config: Config) -> str:
    """A short text for a config: its class, and the fields that differ from their defaults.

    For a user's function, its choices.

    >>> from sparsetir.schedules.templates.row_tile import RowTile
    >>> short(RowTile(tile=64, pack=True))
    'RowTile tile=64 pack'
    """
    if isinstance(config, Choices):
        chosen = (f"{name}={value}" for name, value in config.items() if value != "")
        return " ".join(chosen) or "default schedule"
    words = [type(config).__name__]
    assert is_dataclass(config) and not isinstance(config, type)
    for field in fields(config):
        value = getattr(config, field.name)
        if field.default is not MISSING and value == field.default:
            continue
        if isinstance(value, bool):
            words.append(field.name if value else f"no {field.name}")
        elif isinstance(value, Format):
            words.append(str(value))
        else:
            words.append(f"{field.name}={value}")
    return " ".join(words)


def table(tuned: Search, *, graph: str = "", records: object = None) -> str:
    """A table of the best five configs and the default, with counts of trials and warnings.

    graph : the data's name; records : the file of the record, for the last line
    """
    best = ranked(tuned)
    lines = [tuned.task.title(graph), _headline(tuned, best), ""]
    if best:
        shown = [[*row[:-3], row[-1]] for row in (HEADS, *_rows(tuned, best))]
        lines += [*aligned(shown, right=True), ""]
    told = [f"on {tuned.key.device}", _counts(tuned), *_notes(tuned)]
    told += [f"warning: {text}" for text in tuned.warnings]
    first = tuned.first_failure
    if first and not any(first in text for text in tuned.warnings):
        told.append(f"the first failure: {first}")
    lines[0:1] = _wrapped(lines[0])
    lines += [line for text in told for line in _wrapped(text)]
    return "\n".join([*lines, *([f"record: {records}"] if records else [])])


def write_report(tuned: Search, path: Path | str, *, graph: str = "") -> Path:
    """Write a page about a search; needs matplotlib.

    path : replaced by the complete page, or left unchanged on failure
    graph : the name of the data

    Raises ImportError without matplotlib, OSError if the file cannot be written.
    """
    need("write_report", "matplotlib", "tune")
    path = Path(path)
    text = as_html(tuned.task.title(graph), _sections(tuned, graph))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return path


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def _headline(tuned: Search, best: list[Trial]) -> str:
    if not best:
        return "No config worked."
    over = _times(tuned, best[0])
    beside = "" if over == "-" else f", {over} times as fast as the default"
    return f"best: {micros(seconds(best[0]))}{beside}"


def _times(tuned: Search, trial: Trial) -> str:
    """The speedup over the default, or "-" if that did not run."""
    default = tuned.default_seconds
    return "-" if default is None else f"{default / seconds(trial):.2f}"


def _rows(tuned: Search, best: list[Trial]) -> list[tuple[str, ...]]:
    """The rows under HEADS: the best configs, and the default."""
    named = [(str(n), trial) for n, trial in enumerate(best[:COUNT], 1)]
    named += [("default", trial) for trial in best if trial.config == tuned.default]
    return [
        (
            name, micros(seconds(t)), _times(tuned, t), _padding(t), memory(t.outcome.bytes),
            micros(t.outcome.convert_seconds), micros(t.outcome.compile_seconds), short(t.config),
        )
        for name, t in named
    ]  # fmt: skip


def _padding(trial: Trial) -> str:
    share = trial.outcome.padding
    return "-" if share is None else f"{100 * share:.1f} %"


def _notes(tuned: Search) -> list[str]:
    """Remarks on the rows."""
    return [ONE_CONFIG] if tuned.configs == 1 and tuned.trials else []


def _counts(tuned: Search) -> str:
    """A text with the numbers of trials by outcome."""
    counts = {s: tuned.counts[s] for s in STATES if s in tuned.counts}
    failures = {s: n for s, n in counts.items() if s not in (OK, PRUNED)}
    text = f"{many(len(tuned.trials), 'trial')}: {counts.get(OK, 0)} measured"
    if counts.get(PRUNED):
        text += f", {counts[PRUNED]} given up as slow"
    text += "".join(f", {n} {state}" for state, n in failures.items())
    return text + "; interrupted" * tuned.interrupted


def _sections(tuned: Search, graph: str) -> list[Section]:
    best, trials, failures = ranked(tuned), tuned.trials, tuned.failures
    text = [_headline(tuned, best), *(short(t.config) for t in best[:1])]
    sections = [Section("Result", [*text, _counts(tuned), *tuned.warnings])]
    if best:
        told = [*_notes(tuned), MEMORY]
        sections.append(Section("Best configs", told, HEADS, _rows(tuned, best)))
    drawn = _history(tuned) if trials else ""
    text = [] if drawn else ["There were no trials."]
    sections.append(Section("Search history", text, picture=drawn))
    shares = {name: value for name, value in tuned.importances.items() if value > 0}
    drawn = _importances(shares) if shares else ""
    text = [] if drawn else ["Too few trials worked to tell."]
    sections.append(Section("Parameter importance", text, picture=drawn))
    sections += _subject(tuned, best[0] if best else None, graph)
    text = [] if failures else ["There were none."]
    if len(failures) > MOST_FAILURES:
        text = [f"The first {MOST_FAILURES} of {len(failures)}."]
    told = [
        (t.number, t.outcome.state, short(t.config), t.outcome.message)
        for t in failures[:MOST_FAILURES]
    ]
    sections.append(Section("Failures", text, ("trial", "state", "config", "message"), told))
    if trials:
        rows = [("trial", "state", "time", "padding", "after", "config", "message")]
        for t in trials:
            o, after = t.outcome, duration(t.when)
            cost = micros(o.seconds), _padding(t), after
            rows.append((str(t.number), o.state, *cost, short(t.config), o.message))
        shown = f"show {len(trials)}", "\n".join(aligned(rows))
        sections.append(Section("All trials", folded=[shown]))
    return [*sections, Section("Environment", rows=_environment(tuned))]


def _subject(tuned: Search, best: Trial | None, graph: str) -> list[Section]:
    """Sections about the function and its schedule, or the matrix and its storage."""
    if isinstance(tuned, TunedProgram):
        sections = [Section("The function", code=tuned.task.program.script())]
        config = None if best is None else best.config
        if config:  # show the scheduled function, over coordinates
            sch = Schedule(tuned.task.program)
            tuned.task.apply()(sch, dict(config) if isinstance(config, Choices) else config)
            sections.append(Section("Its best schedule", code=sch.func.script()))
        elif best is not None:
            sections.append(Section("Its best schedule", ["The default one."]))
        return sections
    assert isinstance(tuned, Tuned)
    several = isinstance(tuned, TunedSparse)
    matrix = tuned.task.matrix.each[0] if several else tuned.task.matrix
    name = graph or None
    drawn = _image("Stored elements", lambda: matrix.plot(name=name))
    sections = [Section("The matrix", picture=drawn)]
    if best is None:
        return sections
    stored, text, picture = getattr(best.config, "format", None), [], ""
    if isinstance(stored, Format):
        picture = _image(f"Storage in {stored}", lambda: matrix.plot(stored, name=name))
    else:
        size, share = memory(best.outcome.bytes), _padding(best)
        text = [f"In the layout of {type(best.config).__name__}: {size}, {share} padding."]
    return [*sections, Section("How it is stored", text, picture=picture)]


def _environment(tuned: Search) -> list[tuple[str, object]]:
    key = tuned.key
    threads = [("threads", tuned.task.threads)] if key.threads else []
    return [
        ("device", key.device),
        ("target", key.target),
        *threads,
        ("data", key.fingerprint),
        ("sparsetir", _versions.VERSION),
        ("TVM", tvm.__version__),
        ("Python", platform.python_version()),
        ("written", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")),
    ]


# -- charts and pictures, as images embedded in HTML ----------------------------------------------


def _history(tuned: Search) -> str:
    """Draw the time of each trial by number, the best so far as a line, failures at the top.

    The default's time, if it was tried, is a horizontal line.
    """
    first = next((t for t in tuned.trials if t.config == tuned.default), None)
    default = None if first is None else first.outcome.seconds
    right, slow = ([t for t in tuned.trials if t.outcome.state == state] for state in (OK, PRUNED))

    def draw() -> Figure:
        figure, ax = _axes(3.6)
        ax.set_yscale("log")
        ax.scatter(*_points(right), c=MEASURED, s=26, label="measured")
        ax.scatter(*_points(slow), facecolors="none", edgecolors=MEASURED, label="given up as slow")
        numbers, times = _points(right)
        ax.step(numbers, list(accumulate(times, min)), where="post", c=BEST, label="best so far")
        if default:
            ax.axhline(1e6 * default, c=DEFAULT, linestyle="--", label="default")
        failed = [t.number for t in tuned.failures]
        if failed:  # above all times, in units of the axes
            across = ax.get_xaxis_transform()
            ax.scatter(failed, [1.03] * len(failed), c=FAILED, marker="x", label="failed",
                       transform=across, clip_on=False)  # fmt: skip
        ax.set_xlabel("trial")
        ax.set_ylabel("time of a call (µs)")
        ax.grid(axis="y", linewidth=0.7)
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.06), ncols=5, fontsize=9)
        return figure

    return _image("Time of each trial", draw)


def _importances(shares: Mapping[str, float]) -> str:
    """Draw the importance of the most important parameters."""
    shown = dict(sorted(shares.items(), key=lambda item: -item[1])[:MOST_BARS])

    def draw() -> Figure:
        figure, ax = _axes(0.9 + 0.3 * len(shown))
        bars = ax.barh(list(shown), list(shown.values()), color=MEASURED, height=0.62)
        ax.bar_label(bars, fmt="%.2f", padding=5, fontsize=9)
        ax.invert_yaxis()
        ax.set_xlabel("share of what times depend on")
        ax.grid(axis="x", linewidth=0.7)
        return figure

    return _image("Parameter importance", draw)


def _points(trials: Sequence[Trial]) -> tuple[list[int], list[float]]:
    """The numbers of trials, and their times in µs."""
    return [t.number for t in trials], [1e6 * seconds(t) for t in trials]


def _axes(height: float) -> tuple[Figure, Axes]:
    """A figure of the page's width, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(INCHES, height), layout="constrained")
    return figure, figure.subplots()


def _image(title: str, make: Callable[[], Figure]) -> str:
    """A figure as an embedded image: SVG, or PNG if that is long."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = make()
        data, kind = _saved(figure, "svg"), "svg+xml"
        if len(data) > MOST_TEXT:
            data, kind = _saved(figure, "png"), "png"
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    width = f"max-width:{figure.get_figwidth() * PIXELS:.0f}px"
    return f'<img alt="{escape(title)}" src="{source}" style="{width}">'


def _saved(figure: Figure, kind: str) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=DPI, facecolor="white")
    return file.getvalue()
