"""Charts of a report, as SVG that stands in HTML: colours follow the page's, text stays text."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

import numpy as np

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.formats import Format
from sparsetir.plotting.patterns import plot_format, plot_pattern
from sparsetir.records.task import OK, PRUNED
from sparsetir.tuning.progress import micros
from sparsetir.tuning.tuned import Trial, seconds

# Colours that stand for variables of the page's style, which has them for light and for dark.
INK, FAINT, GRID = "#010102", "#010103", "#010104"
OURS, BEST, OTHER, BAD = "#010105", "#010106", "#010107", "#010108"
VARIABLES = {
    INK: "var(--ink)", FAINT: "var(--faint)", GRID: "var(--grid)", OURS: "var(--ours)",
    BEST: "var(--best)", OTHER: "var(--other)", BAD: "var(--bad)",
}  # fmt: skip
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "text.color": INK, "axes.edgecolor": FAINT, "axes.labelcolor": INK,
    "xtick.color": FAINT, "ytick.color": FAINT, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "grid.color": GRID, "axes.facecolor": "none", "figure.facecolor": "none", "font.size": 10,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "legend.labelcolor": INK, "text.parse_math": False,
}  # fmt: skip
PIXEL_COLOURS = ("#56b4e9", "#d55e00")  # of trials and failures, seen on light and on dark
WIDTH = 10.5  # inches
PIXELS = 96  # per inch, on a page
DPI = 130  # of pictures that consist of pixels
MOST_POINTS = 3000  # of a chart, drawn one by one
MOST_TEXT = 150_000  # characters of an SVG
MOST_BARS = 15


def history(trials: Sequence[Trial], default: float | None) -> str:
    """Time of each trial by its number, the best so far as a line, failures at the upper edge.

    default : seconds of the default config, a line across
    """
    timed = [t for t in trials if t.outcome.seconds and t.outcome.state in (OK, PRUNED)]
    failed = [t for t in trials if t.outcome.state not in (OK, PRUNED)]
    right = [t for t in timed if t.outcome.state == OK]

    def draw(figure: Any) -> None:
        ax = figure.subplots()
        rasterized = len(trials) > MOST_POINTS
        ours, bad, size = (*PIXEL_COLOURS, 4) if rasterized else (OURS, BAD, 26)
        ax.set_yscale("log")
        for some, name, style in (
            (right, "measured", {"c": ours, "s": size, "linewidths": 0}),
            ([t for t in timed if t.outcome.state == PRUNED], "given up as slow",
             {"edgecolors": ours, "facecolors": "none", "s": size}),
        ):  # fmt: skip
            if some:
                at = [[t.number for t in some], [1e6 * seconds(t) for t in some]]
                ax.scatter(*at, label=name, rasterized=rasterized, zorder=3, **style)
        last = max(t.number for t in trials)
        if right:
            ax.step(*_best_so_far(right, last), where="post", color=BEST, label="best so far",
                    zorder=4)  # fmt: skip
        if default:
            ax.axhline(1e6 * default, color=OTHER, linestyle="--", linewidth=1.2, label="default",
                       zorder=4)  # fmt: skip
        if failed:
            # Above all times, in units of the axes.
            across = ax.get_xaxis_transform()
            ax.scatter([t.number for t in failed], np.full(len(failed), 1.03), c=bad, marker="x",
                       s=30, transform=across, clip_on=False, label="failed",
                       rasterized=rasterized)  # fmt: skip
        ax.set_xlim(-0.5 - last / 100, last + 0.5 + last / 100)
        ax.set_xlabel("trial")
        ax.xaxis.get_major_locator().set_params(integer=True)
        if timed:
            ax.set_ylabel("time of a call (µs)")
            _plain_log_ticks(ax, timed)
            ax.grid(axis="y", linewidth=0.7)
        else:
            ax.yaxis.set_visible(False)
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.06), ncols=5, fontsize=9)

    return _svg("history", "Time of each trial", draw, (WIDTH, 3.6 if timed else 1.4))


def _best_so_far(right: Sequence[Trial], last: int) -> tuple[list[int], list[float]]:
    """Trials that were better than all before them, and the last trial; µs of the best."""
    numbers: list[int] = []
    best: list[float] = []
    for trial in right:
        taken = 1e6 * seconds(trial)
        if not best or taken < best[-1]:
            numbers.append(trial.number)
            best.append(taken)
    return [*numbers, last], [*best, best[-1]]


def _plain_log_ticks(ax: Any, timed: Sequence[Trial]) -> None:
    """Numbers as 20, 50, 100 instead of powers of ten; few of them where times differ much."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    times = [1e6 * seconds(t) for t in timed]
    spread = max(times) / min(times)
    if spread < 2:  # no number of a logarithmic scale may lie in so small a range
        ax.set_ylim(min(times) / 1.2, max(times) * 1.2)
        ax.yaxis.set_major_locator(MaxNLocator(4))
    else:
        ax.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if spread < 1000 else (1,)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def bars(times: Mapping[str, tuple[float, str]]) -> str:
    """A bar for each name: seconds, and what it is: "best", "ours" or "other"."""
    colours = {"best": BEST, "ours": OURS, "other": OTHER}

    def draw(figure: Any) -> None:
        ax = figure.subplots()
        names = list(times)
        values = [1e6 * times[n][0] for n in names]
        ax.barh(names, values, color=[colours[times[n][1]] for n in names], height=0.62)
        for n, value in enumerate(values):
            ax.annotate(micros(value / 1e6), (value, n), xytext=(5, 0),
                        textcoords="offset points", va="center", fontsize=9)  # fmt: skip
        _frame_of_bars(ax, max(values), "time of a call (µs), less is better")

    return _svg("bars", "Times beside the libraries", draw, (WIDTH, 0.9 + 0.33 * len(times)))


def importances(found: Mapping[str, float]) -> str:
    """How much each parameter decided, the most important ones."""
    shown = sorted(found.items(), key=lambda item: -item[1])[:MOST_BARS]

    def draw(figure: Any) -> None:
        ax = figure.subplots()
        ax.barh([n for n, _ in shown], [v for _, v in shown], color=OURS, height=0.62)
        for n, (_, value) in enumerate(shown):
            ax.annotate(f"{value:.2f}", (value, n), xytext=(5, 0), textcoords="offset points",
                        va="center", fontsize=9)  # fmt: skip
        _frame_of_bars(ax, max(v for _, v in shown), "share of what times depend on")

    return _svg("importances", "Parameter importance", draw, (WIDTH, 0.9 + 0.3 * len(shown)))


def _frame_of_bars(ax: Any, most: float, label: str) -> None:
    ax.invert_yaxis()
    ax.set_xlim(0, 1.12 * most or 1)
    ax.set_xlabel(label)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", linewidth=0.7)
    ax.set_axisbelow(True)


def picture_of_pattern(matrix: SparseMatrix, name: str) -> str:
    """Where elements are stored; the title names the matrix, where it has a name."""
    return _picture("pattern", "Stored elements", lambda: plot_pattern(matrix, name=name or None))


def format_of(config: Any) -> Format | None:
    """What a config stores the matrix in, where that is a format of the library."""
    found = getattr(config, "format", None)
    return found if isinstance(found, Format) else None


def picture_of_format(matrix: SparseMatrix, fmt: Format, name: str) -> str:
    """What a format makes of the matrix; the title names it, where it has a name."""
    draw = partial(plot_format, matrix.to(fmt), name=name or None)
    return _picture("format", f"Storage in {fmt}", draw)


def _picture(name: str, title: str, make: Callable[[], Any]) -> str:
    """A figure of `plot` on white, as SVG, or as PNG where that is much text."""
    import matplotlib

    # Images stay as small as they are; the reader's browser makes them large.
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "image.interpolation": "none",
    }

    with matplotlib.rc_context(style):
        figure = make()
        text = _text(figure, name, title)
        if len(text) <= MOST_TEXT:
            return f'<div class="picture">{text}</div>'
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=DPI)
    data = base64.b64encode(file.getvalue()).decode()
    width = f"max-width:{figure.get_figwidth() * PIXELS:.0f}px"
    image = f'<img alt="{escape(title)}" src="data:image/png;base64,{data}" style="{width}">'
    return f'<div class="picture">{image}</div>'


def _svg(name: str, title: str, draw: Callable[[Any], None], size: tuple[float, float]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name, "savefig.dpi": DPI}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        text = _text(figure, name, title)
    # What is drawn as pixels keeps its colours.
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return text


def _text(figure: Any, name: str, title: str) -> str:
    """The SVG element: names of its parts are its own on the page, and it is as wide as fits."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    first, rest = text.split(">", 1)
    first = re.sub(r' (width|height)="[^"]*"', "", first)
    width = figure.get_figwidth() * PIXELS
    return f'{first} role="img" aria-label="{escape(title)}" style="max-width:{width:.0f}px">{rest}'
