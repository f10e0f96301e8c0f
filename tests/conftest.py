"""Tests without tuning records; kernels compiled once; a table after `test_programs.py`'s.

The table has a row per program and a column per step.
"""

from __future__ import annotations

import gc
import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# What this machine has recorded decides nothing in tests. Here and not in a fixture, because some
# make plans while they are collected; those that use records set it for themselves.
os.environ["SPARSETIR_RECORDS"] = ""
os.environ["SPARSETIR_KERNELS"] = ""  # what is tested is compiled; see compile_cache.py
# Processes of tests share the cores: threads that wait for others sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Column by test.
STEPS = {
    "test_parse": "parse",
    "test_print": "print/parse",
    "test_json": "print/parse",
    "test_verify": "verify",
    "test_program_equals_its_oracle": "interpret",
    "test_lower_sparse_iter": "lower I-II",
    "test_lower_sparse_iter_as_a_pass": "lower I-II",
    "test_lower_sparse_buffer": "lower II-III",
    "test_lower_sparse_buffer_as_a_pass": "lower II-III",
    "test_lower_sparse_buffer_after_the_default_schedule": "lower II-III",
    "test_llvm": "llvm",
    "test_llvm_without_a_schedule": "llvm",
    "test_opencl": "OpenCL",
    "test_cuda_run": "CUDA run",
}
# Of several outcomes in a cell, the first of these shows.
OUTCOMES = {"error": "FAIL", "failed": "FAIL", "skipped": "skip", "passed": "ok"}
FILES = ("tests/test_programs.py", "tests/sparse_ir/test_interpret.py")


# Folders and files whose tests are of many kernels each: these are compiled without LLVM's
# optimisations, unless slow tests run too, or compile_cache.AS_USERS.
QUICK = {
    "data", "expressions", "formats", "graph", "nn", "ops", "schedules", "sparse_ir",
    "test_bench_gpu.py", "test_build.py", "test_compiled.py", "test_kernel.py",
    "test_kernel_computed.py", "test_kernel_refusals.py", "test_lower.py",
    "test_needed_parameters.py", "test_new_process.py", "test_operator_records.py",
    "test_plan.py", "test_plan_edges.py", "test_plan_out_dtype.py", "test_plan_sparse.py",
    "test_plan_sparse_gpu.py", "test_programs.py", "test_random_programs.py", "test_readme.py",
    "test_shapes.py", "test_sparse_results.py", "test_thesis.py",
}  # fmt: skip
HOISTED = "test_statements.py"  # but for this one: TVM hoists, which quick kernels do without
CACHE = pytest.StashKey[Any]()
# In these, kernels by the default schedule have fewer versions by numbers of features, which are
# most of what is compiled: constants of modules, and what they are here.
EVERY = pytest.StashKey[dict[tuple[str, str], Any]]()
FEW = {
    ("sparsetir.schedules.passes.vectorize_innermost", "MOST_NESTS"): 0,
    ("sparsetir.schedules.passes.vectorize_reductions", "STRAIGHT"): 2,
    ("sparsetir.schedules.passes.vectorize_reductions", "COUNTS"): (2,),
}
ALL_VERSIONS = {"test_block_rows.py", "test_multiversion.py"}
# Panels and scatters in parts are for more nonzeros than most patterns here have: they are compiled
# where every program is, and where they run.
LARGE = {
    ("sparsetir.schedules.multiversion", "_with_panels"): (
        lambda func, reduction, sizes, rows, target: rows
    ),
    ("sparsetir.schedules.multiversion", "owners"): lambda: 1,
}
WITH_LARGE = {
    *ALL_VERSIONS, "test_owner_computes.py", "test_programs.py", "test_random_programs.py",
    "test_readme.py", "test_schedule_random.py",
}  # fmt: skip


# Cases of a function above which only so many run by default that each value of each parameter is
# there; and of more, where these are most of them, every other one. But for those that make a
# table, for examples, and for refusals, which take no time.
SEVERAL, MANY = 3, 6
WHOLE = {
    "test_programs.py", "test_interpret.py", "test_all_operators.py", "test_readme.py",
    "test_ptx.py", "test_upstream.py",
}  # fmt: skip
REFUSALS = re.compile(r"test_\w*(refus|wrong|bad_|cannot)")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile each distinct kernel once for all processes that run tests."""
    if getattr(session.config.option, "dist", "no") != "no" and not hasattr(
        session.config, "workerinput"
    ):
        return  # it runs no tests itself, and TVM takes seconds to import
    gc.disable()  # until all tests are collected, which leaves no garbage
    import tvm

    import machines
    import nvrtc
    from compile_cache import FOLDER, Cache, forget_unused

    machines.settle()

    cache = Cache(FOLDER, tvm.compile)
    for files in (FOLDER.glob("*.so"), nvrtc.FOLDER.glob("*.ptx")):
        forget_unused(files)
    tvm.compile = cache.compile
    session.config.stash[CACHE] = cache
    session.config.stash[EVERY] = {
        (module, name): getattr(import_module(module), name) for module, name in [*FEW, *LARGE]
    }
    _look_through_frames_alone()


def _look_through_frames_alone() -> None:
    """TVM's decorators ask `inspect.stack`, which looks through all modules for each frame."""
    from tvm.script.parser.ir import entry as of_modules
    from tvm.tirx.script.parser import entry as of_functions

    from sparsetir.sparse_ir.script.parser import outer_frames

    for entry in (of_modules, of_functions):
        entry.inspect = SimpleNamespace(**{**vars(inspect), "stack": outer_frames})


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Mark some cases of functions with many as slow, or all that are not named; refusals excepted.

    Slow cases, two thirds of all, are left out before pytest makes tests of them, if they would be
    deselected; one stays where there are no others.
    """
    yield
    function, calls, config = metafunc.definition, metafunc._calls, metafunc.config
    slow = function.get_closest_marker("slow") is not None
    default = [c for c in calls if not slow and not {"slow"} & {m.name for m in c.marks}]
    chosen = default
    if function.path.name not in WHOLE and not REFUSALS.match(function.name):
        chosen = _with_each_value(default) if len(default) > SEVERAL else default
        if len(default) > MANY and 2 * len(chosen) > len(default):
            chosen = default[::2]
    for named in (mark.args for mark in function.iter_markers("default")):
        if isinstance(named[0], int):
            chosen = chosen[:: max(len(chosen) // named[0], 1)][: named[0]]
        else:
            assert {*named} <= {c.id for c in calls}, f"{function.nodeid}: no such case"
            chosen = [c for c in default if c.id in named]
    for call in default:
        if all(call is not other for other in chosen):
            call.marks.append(pytest.mark.slow.mark)
    if config.option.markexpr == "not slow":
        calls[:] = chosen or calls[:1]


def _with_each_value(cases: list[Any]) -> list[Any]:
    """Some of the cases of a function, so that each value of each parameter is in one of them."""
    values = [{(k, repr(v)) for k, v in case.params.items()} for case in cases]
    only = [value for value, n in Counter(v for each in values for v in each).items() if n == 1]
    chosen = [i for i, each in enumerate(values) if not each.isdisjoint(only)]
    left = set().union(*values).difference(*(values[i] for i in chosen))
    while left:
        chosen.append(max(range(len(cases)), key=lambda i: len(values[i] & left)))
        left -= values[chosen[-1]]
    return [cases[i] for i in sorted(chosen)]


def pytest_collection_finish() -> None:
    """Freeze existing objects: the garbage collector searches the rest, in a tenth of the time."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # little of what tests make is in cycles


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let kernels be compiled once, also those of fixtures for several tests."""
    from compile_cache import AS_USERS

    places = {item.path.parent.name, item.path.name}
    quick = item.config.option.markexpr == "not slow" and bool(places & QUICK) and not AS_USERS
    quick = quick and HOISTED not in places
    item.config.stash[CACHE].quick = quick

    every = item.config.stash[EVERY]
    values = every | (FEW if quick and not places & ALL_VERSIONS else {})
    if quick and not places & WITH_LARGE:
        values |= LARGE
    for (module, name), value in values.items():
        setattr(import_module(module), name, value)


@pytest.fixture(autouse=True)
def gradients() -> Iterator[None]:
    """Restore gradients, which peers of the bench switch off; elsewhere they have processes."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_grad_enabled(True)


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty file of records, which plans consult, and no pattern that was seen."""
    from sparsetir.records import records as module
    from sparsetir.records.records import Records

    monkeypatch.setenv("SPARSETIR_RECORDS", str(tmp_path / "records.sqlite"))
    monkeypatch.setattr(module, "_seen", (None, {}))
    monkeypatch.setattr(module, "_warned", set())
    return Records()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Add the table to pytest's summary."""
    cells: dict[tuple[str, str], str] = {}
    shown = False
    for outcome, word in OUTCOMES.items():
        for report in terminalreporter.stats.get(outcome, []):
            file, _, test = getattr(report, "nodeid", "").rpartition("::")
            test, _, parameters = test.rstrip("]").partition("[")
            if file in FILES and parameters and test in STEPS:
                shown = shown or file == FILES[0]
                cells.setdefault((parameters.split("-")[0], STEPS[test]), word)
    if not shown:
        return
    programs = list(dict.fromkeys(program for program, _ in cells))
    columns = list(dict.fromkeys(STEPS.values()))
    width = max(map(len, programs))
    terminalreporter.section("programs")
    terminalreporter.write_line("  ".join([" " * width, *columns]))
    for program in sorted(programs):
        row = [cells.get((program, c), "-").ljust(len(c)) for c in columns]
        terminalreporter.write_line("  ".join([program.ljust(width), *row]).rstrip())
