"""Progress of a search: a changing line on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from sparsetir.extras import need
from sparsetir.runtime.texts import duration, many, micros
from sparsetir.tuning.tuned import Trial
from sparsetir.tuning.tuned import seconds as seconds_of

EVERY = 10.0  # seconds between lines if there is no terminal
SHARE = 0.1  # share of all trials, likewise
SHAPE = "{desc}|{bar:20}| {n_fmt}/{total_fmt}{postfix}"


class Bar:
    """The progress of :func:`sparsetir.tune`: trials, the best so far, failures and time left.

    label : the run's name, in front of each line
    seconds : the time limit of the run, if it has one
    stream : by default stderr at the start of the run
    """

    def __init__(
        self, label: str = "", seconds: float | None = None, stream: TextIO | None = None
    ) -> None:
        self._label, self._limit, self._stream = label, seconds, stream
        self._bar: Any = None

    def begin(self, total: int, done: int = 0) -> None:
        """Start; total : number of trials; done : those of earlier runs."""
        self._stream = self._stream or sys.stderr
        self._total, self._done, self._before, self._text = total, done, done, ""
        self._start = time.monotonic()
        self._said = (self._start, done)  # time and trials of the last line
        if self._stream.isatty():
            self._bar = _line()(
                total=total, initial=done, desc=f"{self._label} " if self._label else "",
                bar_format=SHAPE, file=self._stream, leave=False, dynamic_ncols=True, mininterval=0,
            )  # fmt: skip
        elif done:
            self._say(f"{many(done, 'trial')} of earlier runs")

    def step(self, trial: Trial, best: Trial | None, failures: int, default: float | None) -> None:
        """Report a finished trial.

        best : the best trial up to now, or None
        default : seconds with the default config, if it runs
        """
        del trial
        self._done += 1
        now, (when, count) = time.monotonic(), self._said
        self._text = self._describe(best, failures, default, now - self._start)
        if self._bar is not None:
            self._bar.set_postfix_str(self._text, refresh=False)
            self._bar.update()
        elif self._done - count >= SHARE * self._total or now - when >= EVERY:
            self._say_where()

    def end(self) -> None:
        """Report the end of a run, complete or interrupted; clears the line on a terminal."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        elif self._text and self._said[1] < self._done:
            self._say_where()

    def _describe(
        self, best: Trial | None, failures: int, default: float | None, passed: float
    ) -> str:
        words = ["no result yet"] if best is None else [f"best {micros(seconds_of(best))}"]
        if best is not None and default:
            words.append(f"{default / seconds_of(best):.2f}x")
        if failures:
            words.append(f"{failures} failed")
        left = passed / (self._done - self._before) * (self._total - self._done)
        if self._limit is not None:
            left = min(left, self._limit - passed)
        return ", ".join([*words, f"{duration(max(0.0, left))} left"])

    def _say_where(self) -> None:
        self._said = (time.monotonic(), self._done)
        self._say(f"trial {self._done}/{self._total}, {self._text}")

    def _say(self, text: str) -> None:
        prefix = f"{self._label}: " if self._label else ""
        print(prefix + text, file=self._stream, flush=True)


def _line() -> Any:
    need("Bar", "tqdm", "tune")
    from tqdm import tqdm

    class Line(tqdm):
        monitor_interval = 0  # no thread of its own

    return Line
