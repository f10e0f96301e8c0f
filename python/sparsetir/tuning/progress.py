"""How far a search is: one line that changes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from sparsetir.extras import need
from sparsetir.records.task import OK
from sparsetir.runtime.texts import duration, many, micros
from sparsetir.tuning.tuned import Trial

EVERY = 10.0  # seconds between lines where there is no terminal
SHARE = 0.1  # of all trials, likewise
SHAPE = "{desc}|{bar:20}| {n_fmt}/{total_fmt}{postfix}"
UNKNOWN = "{desc}{n_fmt} trials{postfix}"


class Bar:
    """The progress of :func:`sparsetir.tune`: trials, the best so far, failures and time left.

    label : of the run, in front of each line
    seconds : the time limit of the run, if it has one
    stream : stderr by default, of the moment when the run begins
    """

    def __init__(
        self, label: str = "", seconds: float | None = None, stream: TextIO | None = None
    ) -> None:
        self._label, self._limit, self._stream = label, seconds, stream
        self._bar: Any = None
        self._default: float | None = None
        self._said = (0.0, 0)  # time and trials of the last line
        self._text = ""

    def begin(self, total: int | None, done: int = 0) -> None:
        """Start.

        total : trials, `None` where time alone ends the run; done : of these, by earlier runs
        """
        self._stream = self._stream or sys.stderr
        self._total, self._done, self._before = total, done, done
        self._default, self._text = None, ""
        self._start = time.monotonic()
        self._said = (self._start, done)
        if self._stream.isatty():
            self._bar = _line()(
                total=total, initial=done, desc=f"{self._label} " if self._label else "",
                bar_format=SHAPE if total else UNKNOWN, file=self._stream, leave=False,
                dynamic_ncols=True, mininterval=0,
            )  # fmt: skip
        elif done:
            self._say(f"{many(done, 'trial')} of earlier runs")

    def step(
        self, trial: Trial, best: Trial | None, failures: int, default: float | None = None
    ) -> None:
        """A trial is over.

        best : the best trial up to now, or None
        default : seconds with the default config; where they are not given, those of the first
            trial that worked count as such
        """
        self._done += 1
        outcome = trial.outcome
        if default is not None:
            self._default = default
        elif self._default is None and outcome.state == OK:
            self._default = outcome.seconds
        self._text = self._describe(best, failures)
        if self._bar is not None:
            self._bar.set_postfix_str(self._text, refresh=False)
            self._bar.update()
            return
        now, (when, count) = time.monotonic(), self._said
        share = self._total is not None and self._done - count >= SHARE * self._total
        if share or now - when >= EVERY:
            self._say_where(now)

    def end(self) -> None:
        """The run is over, or was interrupted; nothing stays on a terminal."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        elif self._text and self._said[1] < self._done:
            self._say_where(time.monotonic())

    def _describe(self, best: Any, failures: int) -> str:
        words = ["no result yet"]
        if best is not None:
            words = [f"best {micros(best.outcome.seconds)}"]
            if self._default:
                words[0] += f", {self._default / best.outcome.seconds:.2f}x"
        if failures:
            words.append(f"{failures} failed")
        left = self._left()
        if left is not None:
            words.append(f"{duration(left)} left")
        return ", ".join(words)

    def _left(self) -> float | None:
        """Seconds until all trials are made, or time is up."""
        passed = time.monotonic() - self._start
        guesses = []
        if self._total is not None and self._done > self._before:
            each = passed / (self._done - self._before)
            guesses.append(each * (self._total - self._done))
        if self._limit is not None:
            guesses.append(self._limit - passed)
        return max(0.0, min(guesses)) if guesses else None

    def _say_where(self, now: float) -> None:
        self._said = (now, self._done)
        count = f"{self._done}" if self._total is None else f"{self._done}/{self._total}"
        self._say(f"trial {count}, {self._text}")

    def _say(self, text: str) -> None:
        prefix = f"{self._label}: " if self._label else ""
        print(prefix + text, file=self._stream, flush=True)


def _line() -> Any:
    need("Bar", "tqdm", "tune")
    from tqdm import tqdm

    class Line(tqdm):
        monitor_interval = 0  # no thread of its own

    return Line
