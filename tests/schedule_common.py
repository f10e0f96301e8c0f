"""Schedules of the test programs, to take apart; tables of calls, and what each says or keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm_ffi

import sparsetir
from programs import PROGRAMS, copied, tolerance
from refusals import in_order
from small import text_of
from sparsetir.sparse_ir.nodes import sparse_iterations
from sparsetir.sparse_ir.schedule.primitives import PRIMITIVES

__all__ = [
    "gives", "keeps_meaning", "opened", "program", "read_back", "refused", "says", "steps", "table",
]  # fmt: skip


# Methods that are no primitives.
GETTERS = ("get_sp_iters", "get_sparse_iteration")


def program(name: str = "spmm", dtype: str = "float32", idtype: str = "int32") -> Any:
    """A test program."""
    return PROGRAMS[name].make(dtype, idtype)


def opened(func: Any = None, name: str = "") -> tuple[Any, Any, list[Any]]:
    """A schedule, a handle of one of its iterations (the first), and those of that one's loops."""
    sch = sparsetir.Schedule(program() if func is None else func)
    it = sch.get_sparse_iteration(name or sparse_iterations(sch.func)[0].name)
    return sch, it, sch.get_sp_iters(it)


def table(text: str) -> list[Any]:
    """Parameters (section, code, words) of a table: `code  # words .. words`, in order.

    A line in brackets begins a section. Code may go on from line to line; words that do not fit
    behind it are indented, on a line of their own.
    """
    section, code, rows = "", "", []
    for line in filter(str.strip, text.splitlines()):
        if line.startswith("["):
            section = line.strip("[]")
            continue
        more, _, words = ("", "", line) if line.startswith(" ") else line.partition("  # ")
        code = "\n".join(filter(None, [code, more]))
        if words:
            rows.append(pytest.param(section, code, words.strip().split(" .. "), id=code))
            code = ""
    return rows


def steps(code: str, sch: Any, it: Any) -> tuple[str, functools.partial[Any]]:
    """Run statements of primitives as functions, loops by the names of their coordinates.

    The last one, a call, is given back with its name: so that it may be looked at before.
    """
    (node,) = [x for x in sparse_iterations(sch.func) if x.name == it.name]
    loops, coordinates = sch.get_sp_iters(it), iter([str(v.name) for v in node.vars])
    scope = {name: getattr(sch, name) for name in (*PRIMITIVES, *GETTERS)}
    scope |= {"".join(next(coordinates) for _ in loop.axes): loop for loop in loops}
    scope |= {"sch": sch, "it": it, "of": sch.get_sparse_iteration}
    *before, last = code.strip().replace("; ", "\n").split("\n")
    exec("\n".join(before), scope)
    name, call_text = last.split("(", 1)
    inputs, options = eval(f"(lambda *x, **y: (x, y))({call_text}", scope)
    return name, functools.partial(scope[name], *inputs, **options)


def refused(code: str, words: list[str], func: Any, iteration: str = "") -> None:
    """Check the last primitive's message: its name, these words in their order, and the iteration.

    Nothing has changed. Words that begin with "-" are of what shows no iteration.
    """
    sch, it, _ = opened(func, iteration)
    name, call = steps(code, sch, it)
    before = sch.func
    with pytest.raises(sparsetir.ScheduleError) as error:
        call()
    text = str(error.value)
    assert text.startswith(f"{name}: "), text
    assert words[0].startswith("- ") or "\n  in T.sp_iter([" in text, text
    in_order(text, words)
    assert sch.func is before


def says(code: str, words: list[str], names: dict[str, Any], error: Any = ValueError) -> str:
    """An expression is refused with these words; the message. `names` are of the tests' file."""
    with pytest.raises(error) as raised:
        eval(code, dict(names))
    in_order(str(raised.value), words)
    return str(raised.value)


def read_back(sch: Any, func: Any) -> None:
    """The text of a scheduled function parses back, and its trace replays on the plain one."""
    text = sch.func.script()
    assert tvm_ffi.structural_equal(sparsetir.from_source(text), sch.func, map_free_vars=True)
    assert tvm_ffi.structural_equal(sch.trace.apply(func).func, sch.func, map_free_vars=True)


def gives(
    scheduled: Any, arguments: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-5,
    atol: float = 0.0, kernel: Any = None,
) -> Any:  # fmt: skip
    """A function or a schedule, whose text parses back, gives results either way; its kernel.

    arguments : by name, which stay as they are; those that it does not take are left out
    """
    func = getattr(scheduled, "func", scheduled)
    again = sparsetir.from_source(func.script())
    assert tvm_ffi.structural_equal(again, func, map_free_vars=True)
    kernel = kernel or sparsetir.build(scheduled)
    names = arguments.keys() & {str(p.name) for p in func.params}
    for run in (sparsetir.interpret, lambda _, inputs: kernel(**inputs)):
        args = copied({name: arguments[name] for name in names})
        for name in expected:
            args[name][...] = np.nan
        run(func, args)
        for name, values in expected.items():
            np.testing.assert_allclose(args[name], values, rtol, atol)
    return kernel


def keeps_meaning(
    sch: Any, name: str, dtype: str = "float32", idtype: str = "int32", cases: Any = None,
    run: Callable[[Any], Any] | None = None,
) -> Any:  # fmt: skip
    """A scheduled test program means on its cases what it meant: interpreted, and compiled.

    run : instead of the kernel for this CPU, which is given back
    """
    tested, func = PROGRAMS[name], program(name, dtype, idtype)
    read_back(sch, func)
    kernel = run or sparsetir.build(sch)
    for case in cases or tested.cases:
        inputs = tested.inputs(np.random.default_rng(1), case, dtype, idtype)
        with np.errstate(all="ignore"):
            want = tested.oracle(inputs)
        others = [copied(inputs), copied(inputs)]
        sparsetir.interpret(sch.func, others[0])
        returned = kernel(others[1]) if run else kernel(**others[1])
        for output, values in want.items():
            for results in (others[0], returned if isinstance(returned, dict) else others[1]):
                np.testing.assert_allclose(
                    np.asarray(results[output], np.float64), values, **tolerance(dtype),
                    err_msg=f"{name}: {case}: {output}\n{sch.trace}",
                )  # fmt: skip
    return kernel


# Sums over blocks with other names.
BLOCKS = text_of("blocks", """
with T.sp_iter([R, S, P, Q, F], "SRSRS", "sums") as [r, s, p, q, f]:
    with T.init():
        Y[r * 4 + p, f] = 0.0
    Y[r * 4 + p, f] = Y[r * 4 + p, f] + V[r, s, p, q] * X[s * 4 + q, f]
""", """
R = T.dense_fixed(m)
S = T.sparse_variable(R, (n, nnz), (indptr, indices))
P = T.dense_fixed(4)
Q = T.dense_fixed(4)
ROW = T.dense_fixed(m * 4)
COL = T.dense_fixed(n * 4)
F = T.dense_fixed(d)
""", V="R S P Q", X="COL F", Y="ROW F")  # fmt: skip
