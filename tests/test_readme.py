"""README.md tells the truth: its Python blocks run in order, and print what it says they print.

A `text` block right after a Python block is some of what that prints: its lines occur in the
output, in this order, without regard to indentation; `...` stands for anything.
"""

import contextlib
import importlib.util
import io
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
ROOMS = [
    f"{room}/README.md"
    for room in ("bench", "formats", "python/sparsetir", "schedules", "sparse_ir", "tests")
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks():
    """(Python, expected text or "") in the order of the file."""
    found = BLOCK.findall(README.read_text())
    for at, (language, code) in enumerate(found):
        if language == "python":
            follows = found[at + 1] if at + 1 < len(found) else ("", "")
            yield code, follows[1] if follows[0] == "text" else ""


def missing_line(expected, output):
    """The first expected line that does not occur after the ones before it, or None."""
    lines = iter(output.splitlines())
    for line in expected.splitlines():
        parts = [re.escape(part) for part in line.strip().split("...")]
        pattern = re.compile(".*".join(parts))
        if line.strip() != "..." and not any(pattern.fullmatch(found.strip()) for found in lines):
            return line
    return None


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each block printed; each is a module, since TVM reads the source of its functions."""
    folder, names, out = tmp_path_factory.mktemp("readme"), {}, []
    for at, (code, _) in enumerate(blocks()):
        name = f"readme_block_{at}"
        (folder / f"{name}.py").write_text(code)
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        vars(module).update(names)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            spec.loader.exec_module(module)
        names |= {k: v for k, v in vars(module).items() if not k.startswith("__")}
        out.append(printed.getvalue())
    yield out
    for at in range(len(out)):
        del sys.modules[f"readme_block_{at}"]


def test_blocks_run(outputs):
    assert len(outputs) == README.read_text().count("\n```python\n") > 5


def test_blocks_print_what_is_said(outputs):
    said = [text for _, text in blocks()]
    for expected, output in zip(said, outputs, strict=True):
        line = missing_line(expected, output)
        assert line is None, f"not printed, or not in this order: {line}\n{output}"
    assert sum(map(bool, said)) == README.read_text().count("\n```text\n")


def test_first_program_is_short():
    code = next(blocks())[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 30


@pytest.mark.parametrize("readme", ["README.md", *ROOMS])
def test_links_lead_somewhere(readme):
    file = ROOT / readme
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", BLOCK.sub("", file.read_text()))
    broken = [k for k in links if "://" not in k and not (file.parent / k).exists()]
    assert not broken
