"""Torch flags that are set only while it compiles for certain backends.

The removal of self loops is an operator with a data-dependent result size: without a flag it breaks
a model into several graphs, though not under torch.compile(fullgraph=True). Under dynamic=True,
floats such as the slope of a leaky ReLU begin as symbols; when torch finds while tracing that it
needs their values, it traces again. So they are constants from the beginning, until one changes.

Dynamo reads flags when it traces, long before it calls a backend, and with the first flag Inductor
fails on models that it otherwise compiles; so the context that dynamo enters around a compilation
checks which backend it is for.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch._dynamo import callback, config, disable, symbolic_convert
from torch._dynamo.exc import UserError, UserErrorType
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

FLAG = "capture_dynamic_output_shape_ops"
OF_FIRST = "specialize_float"  # set when a function is compiled for the first time
# Finds the function of a line of source by splitting its file into tokens. Torch 2.13 calls it for
# each operator that it traces, from Python 3.11 on, for a log that is off.
NAME_OF_LINE = "get_funcname"
# Attributes by which torch's wrappers of a backend hold it.
INNER = ("_torchdynamo_orig_backend", "compiler_fn")


class _Compilation:
    """The context of a compilation by dynamo, with flags set for backends that want them."""

    def __init__(
        self, callbacks: AbstractContextManager[Any], wanted: Callable[[Any], bool]
    ) -> None:
        self._callbacks = callbacks
        self._wanted = wanted
        self._before: dict[tuple[Any, str], Any] = {}

    # A backward pass in a compiled function nests compilations. If dynamo compiled these methods in
    # turn, it would deadlock on the lock that it holds meanwhile.
    @disable
    def __enter__(self) -> None:
        self._callbacks.__enter__()
        compilation = _compilation()
        if any(map(self._wanted, _backends(compilation))):
            is_first = "cache_entry" in compilation and compilation["cache_entry"] is None
            wanted: dict[tuple[Any, str], Any] = {(config, FLAG): True}
            if is_first and hasattr(config, OF_FIRST):
                wanted[config, OF_FIRST] = True
            if hasattr(symbolic_convert, NAME_OF_LINE) and not _logs():
                wanted[symbolic_convert, NAME_OF_LINE] = lambda *_: None
            self._before = {(of, name): getattr(of, name) for of, name in wanted}
            for (of, name), value in wanted.items():
                setattr(of, name, value)

    @disable
    def __exit__(self, *raised: Any) -> None:
        error = raised[1]
        for (of, name), value in self._before.items():
            setattr(of, name, value)
        self._callbacks.__exit__(*raised)
        # Without the flag, code that needs a data-dependent size would come after a graph break.
        if self._before.get((config, FLAG)) is False and isinstance(
            error, GuardOnDataDependentSymNode
        ):
            raise UserError(UserErrorType.DYNAMIC_CONTROL_FLOW, str(error)) from error


def _logs() -> bool:
    """Whether some log of dynamo's tracing is on."""
    names = (
        "_dynamo",
        "_dynamo.output_graph.__trace_call",
        "_dynamo.symbolic_convert.__trace_source",
    )
    return any(logging.getLogger(f"torch.{name}").isEnabledFor(logging.DEBUG) for name in names)


def _compilation() -> dict[str, Any]:
    """The variables of dynamo's compiling function, which calls this one."""
    frame = sys._getframe()
    while frame is not None and not (
        frame.f_code.co_name == "_compile" and INNER[1] in frame.f_locals
    ):
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def _backends(compilation: dict[str, Any]) -> Iterator[Any]:
    """The backend that dynamo compiles for, and the backends that it wraps."""
    backend = compilation.get(INNER[1])
    while backend is not None:
        yield backend
        held = (getattr(backend, name, None) for name in INNER)
        backend = next((x for x in held if x is not None), None)


def install(wanted: Callable[[Any], bool]) -> None:
    """Make dynamo set the flags from now on when it traces for a backend that wants them.

    A function that then needs a data-dependent size runs in Python, like other code that dynamo
    does not support; the functions it calls are compiled.
    """
    handler: Any = callback.callback_handler
    plain = handler.install_callbacks
    handler.install_callbacks = disable(lambda *args: _Compilation(plain(*args), wanted))
