"""Torch's flag for operators whose results' sizes follow from contents, set for one backend alone.

Self loops that are taken out of edges are such: without the flag they break a model into several
graphs, as they do not under torch.compile(fullgraph=True). Dynamo reads the flag when it traces,
long before it calls a backend, and the flag makes Inductor fail on models that it compiles
without; so what dynamo enters around a compilation asks for which backend it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch._dynamo import callback, config, disable
from torch._dynamo.exc import UserError, UserErrorType
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

FLAG = "capture_dynamic_output_shape_ops"
# Attributes by which torch's wrappers of a backend hold it.
INNER = ("_torchdynamo_orig_backend", "compiler_fn")


class _Compilation:
    """A compilation of dynamo's, with the flag set where it is for a backend that wants it."""

    def __init__(
        self, callbacks: AbstractContextManager[Any], wanted: Callable[[Any], bool]
    ) -> None:
        self._callbacks = callbacks
        self._wanted = wanted
        self._before: bool | None = None

    # A backward pass inside of a compiled function is one inside of another. If dynamo compiled
    # these methods in turn, it would wait forever for the lock that it holds meanwhile.
    @disable
    def __enter__(self) -> None:
        self._callbacks.__enter__()
        if any(map(self._wanted, _backends())):
            self._before = getattr(config, FLAG)
            setattr(config, FLAG, True)

    @disable
    def __exit__(self, *raised: Any) -> None:
        before, error = self._before, raised[1]
        if before is not None:
            setattr(config, FLAG, before)
        self._callbacks.__exit__(*raised)
        # What asks for a size that only contents give would, without the flag, be behind a break.
        if before is False and isinstance(error, GuardOnDataDependentSymNode):
            raise UserError(UserErrorType.DYNAMIC_CONTROL_FLOW, str(error)) from error


def _backends() -> Iterator[Any]:
    """What the frame of dynamo that called compiles with, and what it wraps."""
    frame = sys._getframe()
    while frame is not None and not (
        frame.f_code.co_name == "_compile" and INNER[1] in frame.f_locals
    ):
        frame = frame.f_back
    backend = frame and frame.f_locals[INNER[1]]
    while backend is not None:
        yield backend
        held = (getattr(backend, name, None) for name in INNER)
        backend = next((x for x in held if x is not None), None)


def install(wanted: Callable[[Any], bool]) -> None:
    """Set the flag from now on where dynamo traces for a backend that wants it.

    A function that then asks for a size which only contents give is left to Python, as dynamo does
    with what it does not support; what it calls is compiled.
    """
    handler: Any = callback.callback_handler
    plain = handler.install_callbacks
    handler.install_callbacks = disable(lambda *args: _Compilation(plain(*args), wanted))
