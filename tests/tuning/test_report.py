"""The progress of a search, its table and its page."""

import io
import re
from html.parser import HTMLParser

import pytest

from sparsetir.formats import Hyb
from sparsetir.runtime import file_errors
from sparsetir.schedules.templates.decomposed import Decomposed
from sparsetir.tuning import progress
from sparsetir.tuning.progress import Bar
from sparsetir.tuning.report import table, write_report
from sparsetir.tuning.sought import operator_search
from sparsetir.tuning.tuned import Trial
from tuning import tuned_fake

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """The text of a page, whose elements are well nested; what its images hold."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.images = [], [], {}
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.images[dict(attrs)["alt"]] = dict(attrs)["src"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def written(tmp_path, tuned, **more):
    """The text of the page of a search, its images by their titles, and how long it is."""
    path = write_report(tuned, tmp_path / "report.html", **more)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert "<script" not in text and "@import" not in text and "http" not in text
    assert all(re.match("data:image/(svg.xml|png);base64,", x) for x in page.images.values())
    return " ".join(w.strip() for w in page.words if w.strip()), page.images, len(text)


def test_table():
    tuned = tuned_fake.tuned(warnings=["no room for the record"])
    lines = table(tuned, graph="cora", records="/a/records.sqlite").splitlines()
    assert lines[0] == "spmm on cora (60 x 50, 300 elements), 32 features, float32, 1 thread"
    assert lines[1] == "best: 39.0 µs, 1.54 times as fast as the default"
    assert re.split(r" {2,}", lines[3].strip()) == [
        "time", "x default", "padding", "memory", "config"
    ]  # fmt: skip
    assert [line.split()[:2] for line in lines[4:10]] == [
        ["1", "39.0"], ["2", "44.0"], ["3", "48.0"], ["4", "52.0"], ["5", "58.0"],
        ["default", "60.0"],
    ]  # fmt: skip
    assert " ".join(lines[4].split()[2:]) == (
        "µs 1.54 0.0 % 20 KiB RowTile tile=32 lanes=8 no tiles_first"
    )
    assert lines[-4:] == [
        "14 trials: 10 measured, 1 given up as slow, 1 wrong, 1 crashed, 1 hung",
        "warning: no room for the record", f"the first failure: {tuned_fake.MESSAGE}",
        "record: /a/records.sqlite",
    ]  # fmt: skip
    assert all(len(line) <= 100 for line in lines)


def test_page(tmp_path):
    words, images, length = written(
        tmp_path, tuned_fake.tuned(warnings=["disk <full>"]), graph="a<b>"
    )
    for expected in (
        "spmm on a<b> (60 x 50, 300 elements)", "1.54 times as fast as the default", "disk <full>",
        "Best configs", "RowTile tile=64 pack parts=2", tuned_fake.MESSAGE, "killed by SIGSEGV",
        "show 14", "target",
    ):  # fmt: skip
        assert expected in words
    assert set(images) == {"Time of each trial", "Parameter importance", "Stored elements"}
    assert length < 400_000


def test_page_shows_the_format(tmp_path):
    trials = [t for t in tuned_fake.trials() if t.config == Decomposed(Hyb(1, 3))]
    for matrix in (tuned_fake.matrix(20, 30), tuned_fake.matrix(400, 300)):
        result = tuned_fake.tuned(trials, of=tuned_fake.task(given=matrix))
        _, images, length = written(tmp_path, result, graph=r"$\cora$")
        assert "Storage in Hyb(c=1, k=3)" in images and length < 700_000


def test_pages_of_other_operators(tmp_path):
    """The best schedule along edges is that of a config, and not of a user's choices."""
    matrix, on = tuned_fake.matrix(30, 30), {"target": "llvm", "device": None}
    words, images, _ = written(tmp_path, operator_search("spgemm", matrix, matrix, **on)[0])
    assert words.startswith("spgemm (30 x 30") and "Stored elements" in images
    result = operator_search("softmax", matrix, **on)[0]
    result.trials = [Trial(0, result.default, tuned_fake.outcome(1.0), 0.1)]
    words, _, _ = written(tmp_path, result)
    assert "Its best schedule" in words and "The default one." not in words


def test_a_page_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("before")

    def full(descriptor, *args, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_errors.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_report(tuned_fake.tuned(), path)
    assert path.read_text() == "before" and len(list(tmp_path.iterdir())) == 1


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances on request."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def go(bar, clock, total, done=0, each=1.0, default=60e-6):
    """All trials of a run; the best comes with the second one."""
    some = tuned_fake.trials()
    bar.begin(total, done)
    for number in range(done, total):
        clock[0] += each
        best = some[1] if number - done else some[0]
        bar.step(some[0], best, number // 4, default)


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
    bar.step(tuned_fake.trials()[0], None, 0, None)
    bar.end()
    captured = capsys.readouterr()
    assert not captured.out and captured.err == "trial 1/1, no result yet, 0 s left\n"
