"""What the site is made of: docstrings as pages show them, links, tables of measurements."""

import importlib
import inspect
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module", autouse=True)
def path():
    added = [str(ROOT / "docs"), str(ROOT / "docs" / "_ext")]
    sys.path[:0] = added
    yield
    for folder in added:
        sys.path.remove(folder)


def test_docstrings_are_plain_text():
    from plain_docstrings import protected

    text = """Multiply A * B into C_, `x * y` as it is.

Before::

    C_ = A * B

Parameters
----------
*operands : (m, n) array
    One | more.

>>> 2 * 3
6"""
    assert protected(text.splitlines()) == (
        text.replace("A * B into C_", r"A \* B into C\_").replace("One |", r"One \|").splitlines()
    )


def test_links_of_pages():
    from repository_links import relinked

    text = "[a](../README.md) [b](docs/x.md#y) [c](../tests/a.py) [d](https://e) ![f](g.png)"
    assert relinked(text, "docs/page.md", "docs/page.md") == (
        "[a](index.md) [b](docs/x.md#y) c [d](https://e) ![f](g.png)"
    )
    assert relinked("[b](docs/x.md#y)", "CONTRIBUTING.md", "docs/contributing.md") == (
        "[b](x.md#y)"
    )


def test_pages_say_what_the_file_does():
    """After a new measurement: `python -m docs.speed`."""
    from docs import measured, speed

    marks = []
    for page in speed.PAGES:
        text = (ROOT / page).read_text()
        marks += [found[1] for found in speed.MARK.finditer(text)]
        assert text.count("<!-- speed ") == len(speed.MARK.findall(text)), page
        assert speed.filled(text) == text, page
    assert set(marks) == set(speed.TEXTS)
    operators = importlib.import_module("operator_table")
    (shown,) = operators.MARKED.findall((ROOT / "docs" / "operators.md").read_text())
    assert shown == operators.table()
    found = {c.key: c for c in measured.comparisons()}
    assert len(found) == len(measured.comparisons())
    assert all(0 < cell.ratio < 1000 for c in found.values() for cell in c.cells)
    # By another way: losses beside MKL, straight from the file.
    steps = json.loads(measured.file().read_text())["results"]["steps"]
    times = [
        (c["peers"]["mkl"]["min"], c["peers"]["sparsetir"]["min"])
        for c in steps["mkl avx512"]["results"]["cells"]
    ]
    assert sum(mkl < 0.99 * ours for mkl, ours in times) == len(found["forced"].lost)
    assert min(mkl / ours for mkl, ours in times) == found["forced"].worst.ratio


@pytest.mark.parametrize("room", ["", ".distributed", ".formats", ".masks", ".nn", ".ops"])
def test_reference_has_all_public_names(room):
    """A page for each module, which names all, or has members of the module as a whole."""
    pages = [page.read_text() for page in (ROOT / "docs" / "api").glob("*.md")]
    if room:
        (page,) = (page for page in pages if f".. automodule:: sparsetir{room}\n" in page)
        pages = [] if f"{room}\n   :members:" in page else [page]
    named = re.findall(r"^\.\. auto\w+:: (?:sparsetir\.)?(\w+)$", "\n".join(pages), re.MULTILINE)
    module = importlib.import_module(f"sparsetir{room}")
    assert not pages or set(module.__all__) <= set(named)
    # A submodule hides what its package imported under the same name before.
    assert not room or not any(inspect.ismodule(getattr(module, k)) for k in module.__all__)


@pytest.mark.slow
def test_site_is_built_without_warnings(tmp_path):
    from sphinx.cmd.build import main

    assert main(["-q", "-W", "-b", "html", str(ROOT / "docs"), str(tmp_path / "site")]) == 0
    assert (tmp_path / "site" / "tutorial.html").exists()
