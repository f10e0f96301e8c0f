"""Functions in files as arguments of commands: programs and schedules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from sparsetir.cli.arguments import Failed, UsageError
from sparsetir.schedules.operators.names import OPS
from sparsetir.tuning.schedule_ref import load_file

if TYPE_CHECKING:
    import scipy.sparse as sp
    from tvm import tirx

    from sparsetir.cli.arguments import Facts
    from sparsetir.sparse_ir.nodes import SparseFunc

PLUGGED_IN = "one of a plug-in (--modules)"


def is_file(text: str) -> bool:
    """Whether an argument OP|FILE names a file."""
    return text.endswith(".py") or ".py:" in text


def operator_named(text: str) -> bool:
    """Whether an argument OP|FILE names an operator that stores elements of a matrix."""
    if is_file(text):
        return False
    from sparsetir.schedules.operators.registry import OPERATORS

    return text in OPS or text in OPERATORS


def function_of(text: str) -> SparseFunc | tirx.PrimFunc:
    """Run a file and return its decorated function; text : `file.py` or `file.py:function`."""
    from tvm import tirx

    from sparsetir.sparse_ir.nodes import SparseFunc

    if not is_file(text):
        raise UsageError(
            f"argument OP|FILE: expected {', '.join(OPS)}, {PLUGGED_IN} or a .py file, got {text!r}"
        )
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


def _run(argument: str, file: Path) -> ModuleType:
    if not file.is_file():
        raise UsageError(f"argument {argument}: {file}: no such file")
    try:
        return load_file(file)
    except Exception as error:
        raise Failed(f"{file}: {type(error).__name__}: {error}") from error
