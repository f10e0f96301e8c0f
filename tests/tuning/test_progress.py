"""The progress of a search: one line on a terminal, few lines elsewhere."""

import io

import pytest

import tuned_fake
from sparsetir.tuning import progress
from sparsetir.tuning.progress import Bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when it is told to."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def go(bar, clock, total, done=0, each=1.0, **more):
    """All trials of a run; the best comes with the second one."""
    some = tuned_fake.trials()
    bar.begin(total, done)
    for number in range(done, total or 10):
        clock[0] += each
        best = some[1] if number - done else some[0]
        bar.step(some[0], best, number // 4, **more)


def test_elsewhere_a_line_for_each_tenth(clock):
    out = io.StringIO()
    bar = Bar("spmm 32", stream=out)
    go(bar, clock, 1000, each=0.01)
    bar.end()
    lines = out.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "spmm 32: trial 100/1000, best 52.0 µs, 1.15x, 24 failed, 9 s left"
    assert lines[-1] == "spmm 32: trial 1000/1000, best 52.0 µs, 1.15x, 249 failed, 0 s left"


def test_trials_of_earlier_runs_take_no_time(clock):
    out = io.StringIO()
    bar = Bar(stream=out)
    go(bar, clock, 40, done=20, each=2.0, default=104e-6)
    assert out.getvalue().splitlines()[:2] == [
        "20 trials of earlier runs", "trial 24/40, best 52.0 µs, 2.00x, 5 failed, 32 s left",
    ]  # fmt: skip


def test_a_terminal_has_one_line(clock):
    out = Terminal()
    bar = Bar("spmm 32", stream=out)
    go(bar, clock, 12)
    shown = out.getvalue()
    assert "\n" not in shown
    last = shown.split("\r")[-1]
    assert last.startswith("spmm 32 |") and "12/12, best 52.0 µs, 1.15x, 2 failed, 0 s left" in last
    bar.end()
    assert "\n" not in out.getvalue() and not out.getvalue().rsplit("\r", 2)[1].strip()
    bar.end()  # as after Ctrl-C in a run that ended its bar


def test_the_stream_is_stderr(capsys):
    bar = Bar()
    bar.begin(1)
    bar.step(tuned_fake.trials()[0], None, 0)
    bar.end()
    captured = capsys.readouterr()
    assert not captured.out and captured.err == "trial 1/1, no result yet, 0 s left\n"
