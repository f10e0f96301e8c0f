"""A device for searches by counts: name it in `modules`.

The seconds of a config are the bound of its launches on an A100, not those of the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable

from ptx.driver import Driver
from ptx.peaks import GPUS
from sparsetir.records.task import OK, Outcome
from sparsetir.tuning import worker

device = Driver(gpu=GPUS["A100"])
device.install()


def timed(
    call: Callable[[], None],
    finish: Callable[[], None] | None,
    best: float | None,
    yardstick: tuple[Callable[[], None], float] | None = None,
) -> Outcome:
    """The bound of a call, as the measurement of that name; `finish` and `best` change nothing."""

    def seconds(run: Callable[[], None]) -> float:
        before = device.seconds
        run()
        return device.seconds - before

    took = seconds(call)
    if yardstick is not None:
        took *= yardstick[1] / seconds(yardstick[0])
    return Outcome(OK, took, took)


worker.timed = timed
