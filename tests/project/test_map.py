"""Calls go where docs/map.md, the map for maintainers, says: compared with a trace of them."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import sparsetir
from trace_map import names_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(sparsetir.__file__).parent
PAGE = (ROOT / "docs" / "map.md").read_text()
FILE = re.compile(r"`([\w/]+\.py)`")
ROW = re.compile(r"^\| `([\w/]+\.py)` \| (`.*`) \| (.+) \|$", re.MULTILINE)


def steps(text):
    """The functions of a part of the page, as "file:name"."""
    return [
        f"{file}:{name}"
        for file, names, _ in ROW.findall(text)
        for name in names[1:-1].split("`, `")
    ]


def parts():
    """Parts of the page by traced call; the second call is a separate part."""
    sections = dict(re.findall(r"^## (Life of .*)\n((?:(?!## ).*\n)*)", PAGE, re.MULTILINE))
    first, second = sections["Life of a product"].split("**The second call**")
    return {**sections, "Life of a product": first, "The second call": second}


def test_files_and_names_exist():
    files = [file for file in FILE.findall(PAGE) if not (ROOT / file).exists()]
    assert [file for file in files if not (PACKAGE / file).exists()] == []
    named = [step.split(":") for step in steps(PAGE)]
    assert len(named) > 100
    assert [f"{f}:{name}" for f, name in named if name not in names_of(PACKAGE / f).values()] == []


def test_calls_come_in_this_order():
    """The order of calls in a new process: no program parsed, and no kernel compiled beforehand."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(ROOT / "tests" / "trace_map.py")]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    traced = json.loads(printed.stdout)
    assert set(traced) == set(parts())
    for section, text in parts().items():
        visited = {step: n for n, step in enumerate(traced[section])}
        assert [step for step in steps(text) if step not in visited] == [], section
        wanted = list(dict.fromkeys(steps(text)))
        assert wanted == sorted(wanted, key=visited.__getitem__), section


def test_concepts_are_few():
    assert 20 <= len(re.findall(r"^\d+\. \*\*", PAGE, re.MULTILINE)) <= 25


def test_files_are_listed(monkeypatch):
    """The table has the first sentence of each file; a file without one would be missing."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    lines = importlib.import_module("file_lines")
    assert {".", "ops", "sparse_ir", "sparse_ir/schedule", "schedules/gpu/passes"} <= set(
        lines.folders()
    )
    for folder in lines.folders():
        names = {file.name for file in (PACKAGE / folder).glob("*.py")} - {"__init__.py"}
        assert names <= set(lines.first_sentences(folder)), folder
    assert "- `cache.py`: " in lines.listed("ops")
