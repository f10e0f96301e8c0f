"""The pages tell the truth: their Python blocks run in order, and print what is said they print.

The pages are README.md, CONTRIBUTING.md and those in docs/. Also what the site is made of:
docstrings as pages show them, links, tables of measurements.

A `text` block right after a Python block is some of what that prints: its lines occur in the
output, in this order, without regard to indentation; `...` stands for anything.
"""

import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fake_measurer import install
from pairs import by_default
from sparsetir.formats.format import REGISTRY
from sparsetir.reductions import REDUCERS, REDUCTION_NAMES
from sparsetir.schedules.operators.registry import OPERATORS
from sparsetir.schedules.templates.registry import TEMPLATES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
]
ELSEWHERE = {"docs/upstream.md"}  # whose programs test_upstream.py runs
WITH_CODE = [
    page for page in PAGES if page not in ELSEWHERE and "\n```python\n" in (ROOT / page).read_text()
]
OF_FOLDERS = [
    f"{folder}/README.md"
    for folder in ("bench", "formats", "python/sparsetir", "schedules", "sparse_ir", "tests")
]
# What they show has its tests in `graph/`, `expressions/`, `runtime/`, `ops/` and `nn/`.
SLOW = {
    f"docs/{name}.md" for name in (
        "mini_batches", "pruned_weights", "torch_compile",
        "tvm",
    )
}  # fmt: skip
# Searches like those of docs/new_operator.md and `tuning/test_measure.py`, which measure.
PRETENDED = {"docs/operators.md", "docs/tuning.md", "docs/tutorial.md"}
REGISTRIES = OPERATORS, TEMPLATES, REGISTRY, REDUCERS, REDUCTION_NAMES
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page):
    """(Python, expected text or "") in the order of the file."""
    fences = BLOCK.findall((ROOT / page).read_text())
    for n, (language, code) in enumerate(fences):
        if language == "python":
            follows = fences[n + 1] if n + 1 < len(fences) else ("", "")
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


@pytest.fixture(scope="module", params=by_default(WITH_CODE, *{*WITH_CODE} - SLOW))
def page(request):
    return request.param


@pytest.fixture(scope="module")
def outputs(page, tmp_path_factory):
    """The output of each block; each is a module, since TVM reads the source of its functions."""
    folder, names, out = tmp_path_factory.mktemp("page"), {}, []
    kept, patch = [dict(registry) for registry in REGISTRIES], pytest.MonkeyPatch()
    if page in PRETENDED:
        install(patch)
    for n, (code, _) in enumerate(blocks(page)):
        name = f"page_block_{n}"
        code = code.replace('if __name__ == "__main__":', "if True:")
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
    patch.undo()
    for registry, before in zip(REGISTRIES, kept, strict=True):  # recipes add to them
        registry.clear()
        registry.update(before)
    for n in range(len(out)):
        del sys.modules[f"page_block_{n}"]


def test_blocks_run(page, outputs):
    assert len(outputs) == (ROOT / page).read_text().count("\n```python\n")


def test_blocks_print_what_is_said(page, outputs):
    texts = [text for _, text in blocks(page)]
    for expected, output in zip(texts, outputs, strict=True):
        line = missing_line(expected, output)
        assert line is None, f"not printed, or not in this order: {line}\n{output}"
    assert sum(map(bool, texts)) == (ROOT / page).read_text().count("\n```text\n")


@pytest.mark.slow
def test_modules_can_be_imported_alone(tmp_path):
    """Each block that is a module, in a separate process; on all pages sparsetir comes first."""
    modules = []
    for page in WITH_CODE:
        code = "".join(block for block, _ in blocks(page))
        first = re.search("^(?:import|from) (sparsetir|tvm)", code, re.M)
        assert first is None or first[1] == "sparsetir", page
        modules += [block for block, _ in blocks(page) if block.startswith('"""')]
    for number, code in enumerate(modules):
        (tmp_path / f"printed_{number}.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'python'}:{tmp_path}"}
    started = [
        subprocess.Popen([sys.executable, "-c", f"import printed_{number}"], env=environment)
        for number in range(len(modules))
    ]
    assert [process.wait() for process in started] == [0] * 4


@pytest.mark.parametrize("readme", [*PAGES, *OF_FOLDERS])
def test_links_lead_somewhere(readme):
    file = ROOT / readme
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", BLOCK.sub("", file.read_text()))
    broken = [k for k in links if "://" not in k and not (file.parent / k).exists()]
    assert not broken


# -- the site -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def extensions():
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
        marks += [mark[1] for mark in speed.MARK.finditer(text)]
        assert text.count("<!-- speed ") == len(speed.MARK.findall(text)), page
        assert speed.filled(text) == text, page
    assert set(marks) == set(speed.TEXTS)
    operators = importlib.import_module("operator_table")
    (shown,) = operators.MARKED.findall((ROOT / "docs" / "operators.md").read_text())
    assert shown == operators.table()
    by_key = {c.key: c for c in measured.comparisons()}
    assert len(by_key) == len(measured.comparisons())
    assert all(0 < cell.ratio < 1000 for c in by_key.values() for cell in c.cells)
    # By another way: losses beside MKL, straight from the file.
    steps = json.loads(measured.file().read_text())["results"]["steps"]
    times = [
        (c["peers"]["mkl"]["min"], c["peers"]["sparsetir"]["min"])
        for c in steps["mkl avx512"]["results"]["cells"]
        if c["threads"] == 1
    ]
    assert sum(mkl < 0.99 * ours for mkl, ours in times) == len(by_key["forced"].lost)
    assert min(mkl / ours for mkl, ours in times) == by_key["forced"].worst.ratio
    # Beside a library on two threads, which would be faster on one.
    slower = 0
    for two, one in zip(*(steps[f"models {n}t"]["results"]["cells"] for n in (2, 1)), strict=True):
        took, alone = two["epoch"], one["epoch"]
        fastest = min(t["Inductor"]["min"] for t in (took, alone))
        slower += took["Inductor"]["min"] > alone["Inductor"]["min"]
        name = f"{two['layer']}, {measured.graph(two['graph'])}"
        (cell,) = (c for c in by_key["epochs 2 Inductor"].cells if c.name == name)
        assert cell.ratio == fastest / took["backend sparsetir"]["min"]
    assert slower


@pytest.mark.parametrize("package", ["", ".distributed", ".formats", ".masks", ".nn", ".ops"])
def test_reference_has_all_public_names(package):
    """A page for each module, which names all, or has members of the module as a whole."""
    pages = [page.read_text() for page in (ROOT / "docs" / "api").glob("*.md")]
    if package:
        (page,) = (page for page in pages if f".. automodule:: sparsetir{package}\n" in page)
        pages = [] if f"{package}\n   :members:" in page else [page]
    named = re.findall(r"^\.\. auto\w+:: (?:sparsetir\.)?(\w+)$", "\n".join(pages), re.MULTILINE)
    module = importlib.import_module(f"sparsetir{package}")
    assert not pages or set(module.__all__) <= set(named)
    # A submodule hides what its package imported under the same name before.
    assert not package or not any(inspect.ismodule(getattr(module, k)) for k in module.__all__)


@pytest.mark.slow
def test_site_is_built_without_warnings(tmp_path):
    from sphinx.cmd.build import main

    assert main(["-q", "-W", "-b", "html", str(ROOT / "docs"), str(tmp_path / "site")]) == 0
    assert (tmp_path / "site" / "tutorial.html").exists()
