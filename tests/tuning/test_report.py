"""The table of a search and its page: figures, and what is missing, wrong or empty."""

import re
from html.parser import HTMLParser

import pytest

import tuned_fake
from machines import MACHINES, on
from sparsetir.formats import Hyb
from sparsetir.records import files
from sparsetir.schedules.templates.decomposed import Decomposed
from sparsetir.schedules.templates.spmm import RowBlocks
from sparsetir.tuning.compare import Comparison, Times
from sparsetir.tuning.html import write_report
from sparsetir.tuning.report import memory, short, summarise, table
from sparsetir.tuning.tuned import Trial

VOID = {"meta", "img", "image", "path", "use", "rect", "line", "circle", "br"}


def comparison(**times):
    """The five best and the default in other times than those of the search."""
    names = ["default", *(f"best {n}" for n in range(1, 6))]
    configs = {name: Times(40e-6 + 1e-6 * n, 50e-6) for n, name in enumerate(names)}
    libraries = {"scipy": Times(300e-6, 310e-6, "product"), "mkl": Times(82e-6, 90e-6, "inspected")}
    return Comparison(configs | times, libraries, {"torch": "No module named 'torch'"}, {}, {})


class Page(HTMLParser):
    """The text of a page; its elements are well nested, and their names unique."""

    def __init__(self, text):
        super().__init__()
        self.open, self.names, self.links, self.words = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.names.append(value)
            if name in ("src", "href", "xlink:href"):
                self.links.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(w.strip() for w in self.words if w.strip())


def written(tmp_path, tuned, found=None, **more):
    path = write_report(tuned, found, tmp_path / "report.html", **more)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert len(set(page.names)) == len(page.names)
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert "<script" not in text and "@import" not in text
    assert not re.search(r"url\((?!#)", text) and "#0101" not in text
    for name in re.findall(r"url\(#(.*?)\)", text) + [n[1:] for n in page.links if n[0] == "#"]:
        assert name in page.names
    return page.text, text


def test_table_of_the_search_alone():
    lines = table(tuned_fake.tuned()).splitlines()
    assert lines[0] == "spmm (60 x 50, 300 elements), 32 features, float32, 1 thread"
    assert lines[1] == "best: 39.0 µs, 1.54 times as fast as the default"
    assert re.split(r" {2,}", lines[3].strip()) == [
        "time", "x default", "padding", "memory", "config"
    ]  # fmt: skip
    assert [line.split()[:2] for line in lines[4:10]] == [
        ["1", "39.0"], ["2", "44.0"], ["3", "48.0"], ["4", "52.0"], ["5", "58.0"],
        ["default", "60.0"],
    ]  # fmt: skip
    assert " ".join(lines[4].split()[2:]) == (
        "µs 1.54 0.0 % 20 KiB RowBlocks tile=32 lanes=8 no tiles_first"
    )
    assert lines[-1] == (
        "14 trials: 10 measured, 1 given up as slow, 3 failed (1 wrong, 1 crashed, 1 hung)"
    )
    assert all(len(line) <= 100 for line in lines)


def test_table_beside_libraries():
    tuned = tuned_fake.tuned(warnings=["no room for the record"])
    text = table(tuned, comparison(), graph="cora", records="/a/records.sqlite")
    lines = text.splitlines()
    assert lines[0].startswith("spmm on cora (")
    assert lines[1:3] == [
        "fastest library: MKL, 82.0 µs",
        "best: 41.0 µs, 0.98 times as fast as the default, 2.00 times as fast as MKL",
    ]
    assert f"on {tuned.key.device}" in " ".join(lines)
    (mkl,) = (line.split() for line in lines if line.startswith("MKL"))
    assert mkl == ["MKL", "82.0", "µs", "0.49", "1.00"]
    (scipy,) = (line.split() for line in lines if line.startswith("scipy"))
    assert scipy == ["scipy", "300", "µs", "0.13", "0.27"]
    assert lines[-3:] == [
        "torch missing: No module named 'torch'", "warning: no room for the record",
        "record: /a/records.sqlite",
    ]  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_table_names_any_machine(name):
    """A long name takes several lines."""
    with on(MACHINES[name]):
        tuned = tuned_fake.tuned()
        text = table(tuned, comparison(), graph="cora", records="/a/records.sqlite")
    assert f"on {tuned.key.device}" in " ".join(text.split())
    assert MACHINES[name].cpu in tuned.key.device


def test_times_measured_again_go_first():
    some = tuned_fake.trials()
    finals = [Trial(n, some[n].config, tuned_fake.outcome(t), 9.0)
              for n, t in ((0, 61e-6), (7, 38e-6), (6, 43e-6))]  # fmt: skip
    tuned = tuned_fake.tuned(some, finals=finals)
    rows = summarise(tuned, None).rows
    assert [(r.name, r.seconds) for r in rows[:2]] == [("1", 38e-6), ("2", 43e-6)]
    assert rows[0].config == tuned.config and rows[0].over_default == tuned.speedup
    assert rows[-1].seconds == 61e-6


def test_rows_are_in_the_order_of_the_times_shown(tmp_path):
    found = comparison(**{"best 3": Times(30e-6, 31e-6)})
    tuned = tuned_fake.tuned()
    rows = summarise(tuned, found).rows
    assert [r.name for r in rows] == ["1", "2", "3", "4", "5", "default"]
    assert [r.trial.number for r in rows[:3]] == [5, 6, 7] and rows[0].seconds == 30e-6
    note = "The search kept 2, which was the fastest at its end."
    assert note in table(tuned, found).splitlines() and note not in table(tuned, comparison())
    assert note in written(tmp_path, tuned, found)[0]


def test_an_incomplete_comparison_gives_the_libraries_alone():
    found = Comparison({"default": Times(1.0, 1.0)}, {"mkl": Times(78e-6, 1.0)})
    best = summarise(tuned_fake.tuned(), found).best
    assert best.seconds == 39e-6 and best.over_vendor == pytest.approx(2)


def test_tables_of_nothing():
    assert "No config worked." in table(tuned_fake.tuned([]))
    failed = tuned_fake.tuned(tuned_fake.trials()[-3:])
    found = Comparison({}, {}, {}, {"sparsetir": "best 1: all wrong"}, {"mkl": "status 1"})
    text = table(failed, found)
    assert "3 trials: 0 measured, 3 failed (1 wrong, 1 crashed, 1 hung)" in text
    assert "sparsetir wrong: best 1: all wrong\nMKL failed: status 1" in text
    no_default = tuned_fake.tuned(tuned_fake.trials()[1:4])
    assert re.search(r"^1 +52.0 µs +- ", table(no_default), re.MULTILINE)


def test_long_configs_are_wrapped():
    config = RowBlocks(
        tile=96, lanes=8, feat=192, prefetch=100, parts=7, blocks=1000, parallel=False, pack=True
    )
    lines = table(tuned_fake.tuned([Trial(0, config, tuned_fake.outcome(1e-3), 1)])).splitlines()
    assert all(len(line) <= 100 for line in lines)
    at = lines[3].index("config")
    assert " ".join(line[at:] for line in lines[4:6]).strip() == short(config)


def test_short():
    assert short(RowBlocks()) == "RowBlocks"
    assert short(RowBlocks(tile=64, pack=True)) == "RowBlocks tile=64 pack"
    assert short(RowBlocks(tiles_first=False)) == "RowBlocks no tiles_first"
    assert short(Decomposed(Hyb(1, 3))) == "Decomposed Hyb(c=1, k=3)"


@pytest.mark.parametrize(
    "size, text", [(None, "-"), (0, "0 B"), (2048, "2.0 KiB"), (93 << 10, "93 KiB"),
                   (5 << 30, "5.0 GiB")],
)  # fmt: skip
def test_memory(size, text):
    assert memory(size) == text


def test_page(tmp_path):
    tuned = tuned_fake.tuned(warnings=["disk <full>"])
    words, text = written(tmp_path, tuned, comparison(), graph="a<b>")
    for expected in (
        "spmm on a<b> (60 x 50, 300 elements)", "2.00x speed of the fastest library, MKL",
        "disk <full>", "Best configs",
        "RowBlocks tile=64 pack parts=2", "torch missing: No module named 'torch'",
        "best so far", "given up as slow", "RowBlocks.tile", "a<b>, 60 x 50: 300 elements",
        tuned_fake.MESSAGE, "killed by SIGSEGV", "show 14", "target",
    ):  # fmt: skip
        assert expected in words
    assert "RowBlocks.pack" not in words  # it decided nothing
    assert len(text) < 300_000
    assert "prefers-color-scheme:dark" in text


def test_page_shows_the_format(tmp_path):
    trials = [t for t in tuned_fake.trials() if t.config == Decomposed(Hyb(1, 3))]
    task = tuned_fake.task(given=tuned_fake.matrix(20, 30))
    words, _ = written(tmp_path, tuned_fake.tuned(trials, of=task), graph=r"$\cora$")
    assert r"$\cora$ as hyb_1_3, 20 x 30" in words and "storage" in words


def test_pages_of_nothing(tmp_path):
    words, _ = written(tmp_path, tuned_fake.tuned([], importances={}))
    assert "No config worked." in words and "There were no trials." in words
    assert "Too few trials worked to tell." in words
    words, _ = written(tmp_path, tuned_fake.tuned(tuned_fake.trials()[-3:]))
    assert "no answer for 60 s" in words and "Best configs" not in words


def test_a_long_search_stays_small(tmp_path):
    words, text = written(tmp_path, tuned_fake.tuned(tuned_fake.many(4000)))
    charts = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    assert len(charts) < 300_000 and "show 4000" in words


def test_large_matrices_are_drawn_small(tmp_path):
    given = tuned_fake.matrix(1200, 800)
    trials = [t for t in tuned_fake.trials() if t.config == Decomposed(Hyb(1, 3))]
    _, text = written(tmp_path, tuned_fake.tuned(trials, of=tuned_fake.task(given=given)))
    assert len(text) < 500_000


def test_a_page_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("before")

    def full(descriptor, *args, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_report(tuned_fake.tuned(), None, path)
    assert path.read_text() == "before" and len(list(tmp_path.iterdir())) == 1
