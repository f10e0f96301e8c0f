"""The declarations of a function while TVM's parser runs its body."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as tir_builder

from sparsetir.sparse_ir.errors import IllFormedError
from sparsetir.sparse_ir.nodes import SparseBuffer

_state = threading.local()


class FunctionContext:
    """The declarations of one function parsed so far."""

    def __init__(self) -> None:
        self.refs: list[Any] = []
        self.buffers: list[SparseBuffer] = []
        self.attrs: dict[str, Any] = {}
        self.iterations: list[Any] = []

    def axis_names(self) -> set[str]:
        return {r.name for r in self.refs if r.name is not None}


def stack() -> list[FunctionContext]:
    """The functions being parsed in this thread, the innermost last."""
    if not hasattr(_state, "stack"):
        _state.stack = []
    return _state.stack


def context(what: str = "this construct") -> FunctionContext:
    """The function being parsed."""
    if not stack():
        raise IllFormedError(f"{what} can only be used inside a @T.prim_func of sparse_tir")
    return stack()[-1]


@contextlib.contextmanager
def function_context() -> Iterator[FunctionContext]:
    """Collect the declarations of one function."""
    stack().append(FunctionContext())
    try:
        yield stack()[-1]
    finally:
        stack().pop()


@contextlib.contextmanager
def capture() -> Iterator[list[tirx.Stmt]]:
    """Collect the statements emitted in this scope, instead of adding them to the parent."""
    out: list[tirx.Stmt] = []
    with IRBuilder() as builder:
        with tir_builder.While(tirx.const(True, "bool")):
            yield out
    out.append(builder.get().body)


def current_span() -> Any:
    """Source position of the statement being parsed; None outside the parser."""
    probe = tirx.Var("probe", "int32")
    return IRBuilder.current()._set_current_source_span(probe).span
