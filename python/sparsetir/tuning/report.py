"""The results of a search as text: the best configs beside the default."""

from __future__ import annotations

import textwrap
from dataclasses import MISSING, dataclass, fields, is_dataclass

from sparsetir.formats import Format
from sparsetir.records.task import OK, PRUNED, STATES, Config
from sparsetir.runtime.texts import WIDTH, aligned, many, memory, micros
from sparsetir.schedules.template import Choices
from sparsetir.tuning.tuned import Search, Trial, seconds

DEFAULT = "default"
COUNT = 5


@dataclass(frozen=True)
class Row:
    """A config in the table.

    name : "1" to "5", or "default"
    seconds : of a call
    over_default : how many times faster than the default; None where that did not run
    trial : where it was measured
    """

    name: str
    seconds: float
    over_default: float | None
    trial: Trial

    @property
    def config(self) -> Config:
        """The trial's config."""
        return self.trial.config


def ranked(tuned: Search) -> list[Trial]:
    """The trials of a search that worked, each config once: the best, then by their times.

    Those that were measured again at its end come first, by these times.
    """
    found: dict[Config, Trial] = {}
    best = [tuned.best] if any(t.outcome.state == OK for t in tuned.trials) else []
    for trials in (best, tuned.finals, tuned.trials):
        worked = [t for t in trials if t.outcome.state == OK]
        for trial in sorted(worked, key=lambda t: (seconds(t), t.number)):
            found.setdefault(trial.config, trial)
    return list(found.values())


def rows(tuned: Search, count: int = COUNT) -> list[Row]:
    """The best configs, the one that the search kept first, and the default, as far as it ran."""
    best = ranked(tuned)
    default = next((t for t in best if t.config == tuned.default), None)
    named = [(str(n), t) for n, t in enumerate(best[:count], 1)]
    named += [] if default is None else [(DEFAULT, default)]
    return [
        Row(name, seconds(t), None if default is None else seconds(default) / seconds(t), t)
        for name, t in named
    ]


def short(config: Config) -> str:
    """A config in a few words: its class, and the fields that are not as they are by default.

    Of a user's function the choices.

    >>> from sparsetir.schedules.templates.spmm import RowBlocks
    >>> short(RowBlocks(tile=64, pack=True))
    'RowBlocks tile=64 pack'
    """
    if isinstance(config, Choices):
        return " ".join(f"{name}={value}" for name, value in config.items()) or "default schedule"
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


def padding(trial: Trial) -> str:
    """The share of padding for people."""
    share = trial.outcome.padding
    return "-" if share is None else f"{100 * share:.1f} %"


def table(tuned: Search, *, graph: str = "", records: object = None) -> str:
    """The best five configs and the default; counts of trials; troubles.

    graph : its name; records : where the record is kept, for the last line
    """
    found = rows(tuned)
    lines = _wrapped(tuned.task.title(graph))
    if not found:
        lines += ["", "No config worked."]
    else:
        lines += [_headline(found[0]), "", *_lines(found)]
    lines += ["", *_wrapped(f"on {tuned.key.device}"), *_wrapped(counts(tuned))]
    lines += [] if note(tuned) is None else _wrapped(str(note(tuned)))
    lines += [line for text in tuned.warnings for line in _wrapped(f"warning: {text}")]
    if records:
        lines.append(f"record: {records}")
    return "\n".join(lines)


def note(tuned: Search) -> str | None:
    """A remark for a reader of the rows, if any."""
    if tuned.configs == 1 and tuned.trials:
        return "There is one config for this problem, the default: nothing to choose."
    return None


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def _headline(best: Row) -> str:
    over = best.over_default
    beside = "" if over is None else f", {over:.2f} times as fast as the default"
    return f"best: {micros(best.seconds)}{beside}"


def _lines(found: list[Row]) -> list[str]:
    rows = [["", "time", "x default", "padding", "memory", "config"]]
    for row in found:
        told = [micros(row.seconds), times(row.over_default), padding(row.trial)]
        rows.append([row.name, *told, memory(row.trial.outcome.bytes), short(row.config)])
    return aligned(rows, right=True)


def times(factor: float | None) -> str:
    """A factor for people."""
    return "-" if factor is None else f"{factor:.2f}"


def counts(tuned: Search) -> str:
    """How many trials there were and what became of them."""
    found = {s: tuned.counts[s] for s in STATES if s in tuned.counts}
    failures = {s: n for s, n in found.items() if s not in (OK, PRUNED)}
    text = f"{many(len(tuned.trials), 'trial')}: {found.get(OK, 0)} measured"
    if found.get(PRUNED):
        text += f", {found[PRUNED]} given up as slow"
    if failures:
        each = ", ".join(f"{n} {state}" for state, n in failures.items())
        text += f", {sum(failures.values())} failed ({each})"
    if tuned.interrupted:
        text += "; interrupted"
    return text
