"""Functions in files that commands are given: programs, and schedules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from sparsetir.cli.arguments import Failed, UsageError
from sparsetir.schedules.operators.names import OPS
from sparsetir.tuning.schedule_ref import load_file

if TYPE_CHECKING:
    from tvm import tirx

    from sparsetir.sparse_ir.nodes import SparseFunc


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
    """The decorated function that `file.py` or `file.py:function` names; the file is run."""
    from tvm import tirx

    from sparsetir.sparse_ir.nodes import SparseFunc

    if not is_file(text):
        raise UsageError(f"argument OP|FILE: expected {', '.join(OPS)} or a .py file, got {text!r}")
    file, wanted = _parts(text)
    module = _run("OP|FILE", file)
    kinds = (SparseFunc, tirx.PrimFunc)
    found = {name: value for name, value in vars(module).items() if isinstance(value, kinds)}
    if not found:
        raise UsageError(f"argument OP|FILE: {file} holds no @T.prim_func at its top level")
    if not wanted and len(found) > 1:
        one = f"{file}:{next(iter(found))}"
        raise UsageError(f"argument OP|FILE: {file} holds {', '.join(found)}: name one, as {one}")
    func = found.get(wanted or next(iter(found)))
    if func is None:
        raise UsageError(f"argument OP|FILE: {file} has no {wanted}, but {', '.join(found)}")
    return func


def schedule_of(text: str) -> Callable[..., object]:
    """The function that `file.py:function` names for --schedule; the file is run."""
    file, name = _parts(text)
    if not is_file(text) or not name:
        raise UsageError(f"argument --schedule: expected file.py:function, got {text!r}")
    found = getattr(_run("--schedule", file), name, None)
    if not callable(found):
        raise UsageError(f"argument --schedule: {file} has no function {name}")
    return found


def _parts(text: str) -> tuple[Path, str]:
    """File and name of `file.py:name`."""
    path, _, name = text.partition(".py:")
    return Path(path if path.endswith(".py") else f"{path}.py"), name


def _run(argument: str, file: Path) -> ModuleType:
    if not file.is_file():
        raise UsageError(f"argument {argument}: {file}: no such file")
    try:
        return load_file(file)
    except Exception as error:
        raise Failed(f"{file}: {type(error).__name__}: {error}") from error
