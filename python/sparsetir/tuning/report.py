"""What a search found, as text: the best configs beside the default and the libraries."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from sparsetir.formats import Format
from sparsetir.records.task import OK, PRUNED, STATES
from sparsetir.schedules.template import Choices
from sparsetir.tuning.compare import DEFAULT, TITLES, Comparison, ranked
from sparsetir.tuning.progress import micros
from sparsetir.tuning.tuned import Search, Trial, seconds

COUNT = 5
WIDTH = 100  # of the table, in characters


@dataclass(frozen=True)
class Row:
    """A config in the table.

    name : "1" to "5", or "default"
    seconds : of a call
    over_default, over_vendor : how many times faster than these
    trial : where it was measured; None for a default that was not
    """

    name: str
    config: Any
    seconds: float
    over_default: float | None
    over_vendor: float | None
    trial: Trial | None


@dataclass(frozen=True)
class Summary:
    """The figures of a report.

    rows : the best configs, the fastest first, and the default as the last one
    vendor : name and seconds of the fastest library
    libraries : seconds by name
    """

    rows: list[Row]
    vendor: tuple[str, float] | None
    libraries: Mapping[str, float]

    @property
    def best(self) -> Row | None:
        """The first of the rows, unless nothing worked."""
        return next((r for r in self.rows if r.name == "1"), None)

    @property
    def default(self) -> Row | None:
        """The row of the default, unless it did not work."""
        return next((r for r in self.rows if r.name == DEFAULT), None)


def summarise(tuned: Search, comparison: Comparison | None, count: int = COUNT) -> Summary:
    """Times of the final comparison; those of the search where that is not complete."""
    best = ranked(tuned)
    chosen: dict[str, Trial | None] = {f"best {n}": t for n, t in enumerate(best[:count], 1)}
    chosen[DEFAULT] = next((t for t in best if t.config == tuned.default), None)
    taken_by = {key: seconds(t) for key, t in chosen.items() if t is not None}
    if comparison is not None and set(taken_by) <= set(comparison.configs):
        taken_by = {key: t.seconds for key, t in comparison.configs.items() if key in chosen}
    libraries, vendor = {}, None
    if comparison is not None:
        libraries = {TITLES.get(n, n): t.seconds for n, t in comparison.libraries.items()}
        if libraries:
            vendor = min(libraries.items(), key=lambda item: item[1])

    def over(other: float | None, taken: float) -> float | None:
        return None if other is None else other / taken

    def row(key: str, name: str, trial: Trial | None) -> Row:
        taken, config = taken_by[key], tuned.default if trial is None else trial.config
        factors = over(taken_by.get(DEFAULT), taken), over(vendor and vendor[1], taken)
        return Row(name, config, taken, *factors, trial)

    # By the times that are shown: they may differ a little from those of the search.
    order = sorted((k for k in chosen if k in taken_by and k != DEFAULT), key=taken_by.__getitem__)
    rows = [row(key, str(n), chosen[key]) for n, key in enumerate(order, 1)]
    if DEFAULT in taken_by:
        rows.append(row(DEFAULT, DEFAULT, chosen[DEFAULT]))
    return Summary(rows, vendor, libraries)


def short(config: Any) -> str:
    """A config in a few words: its class, and the fields that are not as they are by default.

    Of a user's function the choices.

    >>> from sparsetir.schedules.templates.spmm import RowBlocks
    >>> short(RowBlocks(tile=64, pack=True))
    'RowBlocks tile=64 pack'
    """
    if isinstance(config, Choices):
        return " ".join(f"{name}={value}" for name, value in config.items()) or "default schedule"
    words = [type(config).__name__]
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


def memory(size: float | None) -> str:
    """Bytes for people."""
    if size is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def padding(trial: Trial | None) -> str:
    """The share of padding for people."""
    share = None if trial is None else trial.outcome.padding
    return "-" if share is None else f"{100 * share:.1f} %"


def table(
    tuned: Search, comparison: Comparison | None = None, *, graph: str = "", records: Any = None
) -> str:
    """The best five configs, the default and the libraries; counts of trials; troubles.

    graph : its name; records : where the record is kept, for the last line
    """
    summary = summarise(tuned, comparison)
    lines = _wrapped(tuned.task.title(graph))
    if summary.best is None:
        lines += ["", "No config worked."]
    else:
        lines += [*_headline(summary), "", *_rows(summary)]
    lines += ["", *_wrapped(f"on {tuned.key.device}"), *_wrapped(counts(tuned))]
    lines += [line for text in notes(tuned, summary) for line in _wrapped(text)]
    for title in ("missing", "wrong", "failed"):
        for name, why in getattr(comparison, title, {}).items():
            lines += _wrapped(f"{TITLES.get(name, name)} {title}: {why}")
    lines += [line for text in tuned.warnings for line in _wrapped(f"warning: {text}")]
    if records:
        lines.append(f"record: {records}")
    return "\n".join(lines)


def notes(tuned: Search, summary: Summary) -> list[str]:
    """What a reader of the rows should know."""
    if summary.best is None:
        return []
    if tuned.configs == 1:
        return ["There is one config for this problem, the default: nothing to choose."]
    kept = next((r.name for r in summary.rows if r.config == ranked(tuned)[0].config), "1")
    if kept == "1":
        return []
    return [f"The search kept {kept}, which was the fastest at its end."]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def _headline(summary: Summary) -> list[str]:
    best, words = summary.best, []
    assert best is not None
    if best.over_default is not None:
        words.append(f"{best.over_default:.2f} times as fast as the default")
    lines = []
    if best.over_vendor is not None and summary.vendor is not None:
        name, taken = summary.vendor
        words.append(f"{best.over_vendor:.2f} times as fast as {name}")
        ahead = " (faster than all configs)" if best.over_vendor < 1 else ""
        lines.append(f"fastest library: {name}, {micros(taken)}{ahead}")
    return [*lines, f"best: {', '.join([micros(best.seconds), *words])}"]


def _rows(summary: Summary) -> list[str]:
    vendor = summary.vendor[0] if summary.vendor else None
    head = ["", "time", "x default", *([f"x {vendor}"] if vendor else []), "padding", "memory"]
    cells = [[*_cells(row, vendor is not None), short(row.config)] for row in summary.rows]
    default = summary.default
    for name, taken in sorted(summary.libraries.items(), key=lambda item: item[1]):
        over = default.seconds / taken if default else None
        beside = [times(summary.libraries[vendor] / taken)] if vendor else []
        cells.append([name, micros(taken), times(over), *beside, "", "", ""])
    widths = [max(len(row[i]) for row in [head, *cells]) for i in range(len(head))]
    lines = []
    for row in [[*head, "config"], *cells]:
        first = [row[0].ljust(widths[0])]
        first += [c.rjust(w) for c, w in zip(row[1:-1], widths[1:], strict=True)]
        start = "  ".join(first) + "  "
        room = max(24, WIDTH - len(start))
        config = textwrap.wrap(row[-1], room) or [""]
        lines.append((start + config[0]).rstrip())
        lines += [" " * len(start) + more for more in config[1:]]
    return lines


def _cells(row: Row, vendor: bool) -> list[str]:
    beside = [times(row.over_vendor)] if vendor else []
    stored = [padding(row.trial), memory(row.trial.outcome.bytes if row.trial else None)]
    return [row.name, micros(row.seconds), times(row.over_default), *beside, *stored]


def times(factor: float | None) -> str:
    """A factor for people."""
    return "-" if factor is None else f"{factor:.2f}"


def counts(tuned: Search) -> str:
    """How many trials there were and what became of them."""
    found = {s: tuned.counts[s] for s in STATES if s in tuned.counts}
    failures = {s: n for s, n in found.items() if s not in (OK, PRUNED)}
    count = len(tuned.trials)
    text = f"{count} trial{'s' * (count != 1)}: {found.get(OK, 0)} measured"
    if found.get(PRUNED):
        text += f", {found[PRUNED]} given up as slow"
    if failures:
        each = ", ".join(f"{n} {state}" for state, n in failures.items())
        text += f", {sum(failures.values())} failed ({each})"
    if tuned.interrupted:
        text += "; interrupted"
    return text
