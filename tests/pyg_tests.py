"""Run PyG's own tests as they are and through sparsetir, and report what differs, test by test.

::

    python tests/pyg_tests.py PYG/test                         # all of a checkout of PyG's
    python tests/pyg_tests.py PYG/test nn/conv utils --ways layers sparsetir -- -k gat

Ways, each in a process of its own, which is followed by another one where a test ends it:

- `plain`: PyG as it is
- `layers`, `products`: inside `accelerate(compile_from=0)` and `accelerate()`
- `sparsetir`, `aot_eager`: the functions of tests, and what these compile themselves, by
  `torch.compile` with that backend; what fails with torch's "aot_eager", too, is torch's fault

The status is 1 where a test fails that passes in the reference of its way. Random numbers are the
same in each run, and `torch.allclose` allows 1e-6: sums in another order differ by more than 1e-8.
`FULL_TEST=1` of PyG's tests adds those of scripting; pytest's options stand behind `--`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

# By way: the one in which a test has to pass to count.
REFERENCES = {
    "plain": "plain", "layers": "plain", "products": "plain", "aot_eager": "plain",
    "sparsetir": "aot_eager",
}  # fmt: skip
Outcomes = dict[str, tuple[str, str]]


# -- the plug-in of pytest -----------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """The way, and the file of outcomes."""
    parser.addoption("--way", choices=REFERENCES)
    parser.addoption("--outcomes", type=Path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that an earlier process has begun."""
    begun = read(config.option.outcomes)
    items[:] = [item for item in items if item.nodeid not in begun]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """A test in its way."""
    import torch
    import torch_geometric

    from sparsetir.nn import accelerate

    way, plain, close = pyfuncitem.config.option.way, torch.compile, torch.allclose
    torch.compiler.reset()
    torch_geometric.seed_everything(0)

    def compile_so(model: Any = None, **options: Any) -> Any:
        if model is None:
            return partial(compile_so, **options)
        kept = {k: v for k, v in options.items() if k in ("fullgraph", "dynamic")}
        return plain(model, backend=way, **kept)

    def is_close(x: Any, y: Any, rtol: float = 1e-5, atol: float = 1e-8, *more: Any, **named: Any):
        return close(x, y, rtol, max(atol, 1e-6), *more, **named)

    inside: Any = {"layers": partial(accelerate, 0), "products": accelerate}.get(way, nullcontext)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "allclose", is_close)
        if way in ("sparsetir", "aot_eager"):
            patch.setattr(torch, "compile", compile_so)
            pyfuncitem.obj = plain(pyfuncitem.obj, backend=way)
        with inside():
            return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Note a test before it runs: it may end the process."""
    note(item, "ended the process")
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """Note what became of a test."""
    report = yield
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        note(item, report.outcome, "" if crash is None else crash.message.split("\n")[0])
    return report


def note(item: pytest.Item, outcome: str, reason: str = "") -> None:
    """Add a line to the file of outcomes."""
    with item.config.option.outcomes.open("a") as file:
        file.write(json.dumps([item.nodeid, outcome, reason]) + "\n")


def read(path: Path) -> Outcomes:
    """Outcome and reason of each test; the last line of a test counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: (outcome, reason) for name, outcome, reason in map(json.loads, lines)}


# -- the command ---------------------------------------------------------------------------------


def run(tests: Path, parts: list[str], way: str, more: list[str]) -> Outcomes:
    """Outcome and reason of each test in one of the ways."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryDirectory() as folder:
        path, before = Path(folder, "outcomes"), -1
        options = ["-c", os.devnull, f"--rootdir={tests}", "--import-mode=importlib", "-q",
                   "--tb=no", "-p", "no:cacheprovider", "-W", "ignore", f"--way={way}",
                   f"--outcomes={path}", *more, *(str(tests / part) for part in parts)]  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, *options]
        while len(read(path)) > before:
            before = len(read(path))
            done = subprocess.run(command, env=env, cwd=folder, stdout=subprocess.DEVNULL)
            if 0 <= done.returncode <= 5:
                break
        return read(path)


def main(words: list[str]) -> int:
    """The command, with its status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tests", type=Path, help="the folder `test` of a checkout of PyG")
    parser.add_argument("parts", nargs="*", default=["."], help="folders and files in it")
    parser.add_argument("--ways", nargs="+", choices=REFERENCES, default=list(REFERENCES))
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    results: dict[str, Outcomes] = {}
    wrong = 0
    for way in args.ways:
        reference = REFERENCES[way]
        for name in sorted({reference, way} - results.keys(), key=way.__eq__):
            results[name] = run(args.tests.resolve(), args.parts, name, words[end + 1 :])
            counts = Counter(outcome for outcome, _ in results[name].values())
            print(f"{name}: {', '.join(f'{n} {outcome}' for outcome, n in counts.items())}")
        passed = [test for test, (outcome, _) in results[reference].items() if outcome == "passed"]
        whys = {test: results[way].get(test, ("not run", "")) for test in passed}
        failed = [test for test in passed if whys[test][0] != "passed"]
        for test in failed:
            print(f"  {way}: {test}: {': '.join(filter(None, whys[test]))}")
        wrong += len(failed) if way != "aot_eager" else 0
        print(f"{way}: {len(failed)} of {len(passed)} fail that pass in {reference}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
