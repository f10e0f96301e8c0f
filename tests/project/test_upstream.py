"""Faults of TVM that are worked around: each program of docs/upstream.md shows one, as it says.

A test that fails here says that TVM has mended a fault: its work-around may go, and its section.
"""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
START, *SECTIONS = (ROOT / "docs/upstream.md").read_text().split("\n## ")
SECTIONS = {text.partition("\n")[0]: text for text in SECTIONS}
# In separate processes, since one is of TVM's default threads, and others end the process.
APART = [
    "Errors of parallel loops are lost", "Storing what has no value ends the process",
    "An error in `structural_map` frees memory twice",
]  # fmt: skip


def block(text: str, language: str) -> str:
    """The only block of a language."""
    (code,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return code


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Modules of the programs by title: TVM reads the source of its functions."""
    folder = tmp_path_factory.mktemp("upstream")
    modules = {title: f"fault_{n}" for n, title in enumerate(SECTIONS)}
    for title, name in modules.items():
        code = block(START, "python") + "\n\n" + block(SECTIONS[title], "python")
        (folder / f"{name}.py").write_text(code)
    sys.path.insert(0, str(folder))
    yield modules
    sys.path.remove(str(folder))


def printed_apart(module: str) -> str:
    """The output of a program in a separate process."""
    code = "import sys; sys.modules['torch'] = None\n"  # which TVM would import, in seconds
    code += f"sys.path.insert(0, {sys.path[0]!r}); import tvm, signal\n"
    code += "signal.signal(signal.SIGSEGV, signal.SIG_DFL)\n"  # TVM's handler takes seconds
    code += f"import {module}\n"
    env = {name: value for name, value in os.environ.items() if not name.startswith("TVM_")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    return run.stdout + ("a signal ends the process\n" if run.returncode < 0 else "")


@pytest.mark.parametrize("title", SECTIONS)
def test_tvm_has_this_fault(names, capsys, title):
    if title in APART:
        printed = printed_apart(names[title])
    else:
        importlib.import_module(names[title])
        printed = capsys.readouterr().out
    where = SECTIONS[title].rpartition("Worked around in ")[2]
    assert printed == block(SECTIONS[title], "text"), f"mended in this TVM? See {where}"


def test_work_arounds_are_where_the_page_says():
    for title, text in SECTIONS.items():
        files = re.findall(r"`([^`]+\.py)`", text.rpartition("\nWorked around in ")[2])
        assert files, title
        assert all("TVM" in (ROOT / file).read_text() for file in files), title
