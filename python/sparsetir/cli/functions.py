"""Functions in files as arguments of commands: programs and schedules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from sparsetir.cli.arguments import Failed, UsageError
from sparsetir.cli.expressions import is_expression
from sparsetir.schedules.operators.names import NAMED, OPS, is_message
from sparsetir.tuning.schedule_ref import load_file

if TYPE_CHECKING:
    import scipy.sparse as sp
    from tvm import tirx

    from sparsetir.cli.arguments import Facts
    from sparsetir.sparse_ir.nodes import SparseFunc


def is_file(text: str) -> bool:
    """Whether an argument OP|FILE names a file."""
    return text.endswith(".py") or ".py:" in text


def operator_named(text: str) -> bool:
    """Whether an argument OP|FILE names an operator that stores elements of a matrix."""
    # Plug-ins have loaded the module in which they register operators.
    operands = sys.modules.get("sparsetir.schedules.operators.operands")
    return text in OPS or operands is not None and text in operands.OPERATORS


def check_program(text: str, messages: bool) -> None:
    """Raise UsageError for an argument OP|FILE that names nothing, without loading TVM.

    messages : whether the command takes messages, and operators along edges
    """
    names = NAMED if messages else OPS
    if is_file(text):
        _check_file("OP|FILE", _parts(text)[0])
    elif not (
        text in names or operator_named(text) or is_expression(text)
        or messages and (is_message(text) or text == "u_dot_v")
    ):  # fmt: skip
        others = "a message such as u_add_e_max or copy_u_mean, u_dot_v, " if messages else ""
        raise UsageError(
            f"argument OP|FILE: expected {', '.join(names)}, {others}one of a plug-in "
            f"(--modules), an expression or a .py file, got {text!r}"
        )


def function_of(text: str) -> SparseFunc | tirx.PrimFunc:
    """Run a file and return its decorated function; text : `file.py` or `file.py:function`."""
    from tvm import tirx

    from sparsetir.sparse_ir.nodes import SparseFunc

    file, wanted = _parts(text)
    module = _run("OP|FILE", file)
    kinds = (SparseFunc, tirx.PrimFunc)
    candidates = {name: value for name, value in vars(module).items() if isinstance(value, kinds)}
    if not candidates:
        raise UsageError(f"argument OP|FILE: {file} holds no @T.prim_func at its top level")
    if not wanted and len(candidates) > 1:
        one = f"{file}:{next(iter(candidates))}"
        raise UsageError(
            f"argument OP|FILE: {file} holds {', '.join(candidates)}: name one, as {one}"
        )
    func = candidates.get(wanted or next(iter(candidates)))
    if func is None:
        raise UsageError(f"argument OP|FILE: {file} has no {wanted}, but {', '.join(candidates)}")
    return func


def arguments_of(program: SparseFunc, values: Facts, graph: sp.csr_array | None) -> Facts:
    """Complete a function's arguments by those of a graph, random numbers and zeros.

    graph : the matrix of the first sparse axis

    Returns {} if there are none; raises UsageError for arguments that do not fit.
    """
    import numpy as np

    from sparsetir.runtime.bound_arguments import bound_arguments

    values = values if graph is None else {**_graph_arguments(program, graph), **values}
    if not values:
        return {}
    # Files hold index arrays in the type of the library that wrote them.
    arrays = [(x, a.idtype) for a in program.axes for x in (a.indptr, a.indices)]
    for name, dtype in ((x.name, idtype) for x, idtype in arrays if x is not None):
        value = values.get(name)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            continue
        if value.max(initial=0) <= np.iinfo(dtype).max:
            values = {**values, name: value.astype(dtype)}
    try:
        return bound_arguments(program, values, "argument --arg", np.random.default_rng(0))
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def _graph_arguments(program: SparseFunc, matrix: sp.csr_array) -> Facts:
    """Arguments of the first CSR axis: its arrays, its sizes, and the first values over it."""
    for axis in program.axes:
        if axis.kind == "sparse_variable" and axis.parent.kind == "dense_fixed":
            break
    else:
        raise UsageError("argument --graph: the program has no sparse_variable axis under rows")
    m, n = matrix.shape
    values = {
        axis.indptr.name: matrix.indptr.astype(axis.idtype),
        axis.indices.name: matrix.indices.astype(axis.idtype),
    }
    sizes = ((axis.parent.length, m), (axis.length, n), (axis.nnz, matrix.nnz))
    values |= {size.name: value for size, value in sizes if hasattr(size, "name")}
    for buffer in program.buffers:
        names = [a.name for a in buffer.axes or ()]
        if buffer.handle is not None and names == [axis.parent.name, axis.name]:
            values[buffer.handle.name] = matrix.data.astype(buffer.dtype)
            break
    return {str(name): value for name, value in values.items()}


def schedule_of(text: str) -> Callable[..., object]:
    """Run the file of --schedule and return the function that `file.py:function` names."""
    file, name = _parts(text)
    if not is_file(text) or not name:
        raise UsageError(f"argument --schedule: expected file.py:function, got {text!r}")
    schedule = getattr(_run("--schedule", file), name, None)
    if not callable(schedule):
        raise UsageError(f"argument --schedule: {file} has no function {name}")
    return schedule


def _parts(text: str) -> tuple[Path, str]:
    """The file and the name of `file.py:name`."""
    path, _, name = text.partition(".py:")
    return Path(path if path.endswith(".py") else f"{path}.py"), name


def _check_file(argument: str, file: Path) -> None:
    if not file.is_file():
        raise UsageError(f"argument {argument}: {file}: no such file")


def _run(argument: str, file: Path) -> ModuleType:
    _check_file(argument, file)
    try:
        return load_file(file)
    except Exception as error:
        raise Failed(f"{file}: {type(error).__name__}: {error}") from error
