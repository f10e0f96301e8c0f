"""Torch's flag for operators with data-dependent result sizes, set for one backend alone.

The removal of self loops is such an operator: without the flag it breaks a model into several
graphs, though not under torch.compile(fullgraph=True). Dynamo reads the flag when it traces, long
before it calls a backend, and with the flag Inductor fails on models that it otherwise compiles; so
the context that dynamo enters around a compilation checks which backend it is for.
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
    """The context of a compilation by dynamo, with the flag set for backends that want it."""

    def __init__(
        self, callbacks: AbstractContextManager[Any], wanted: Callable[[Any], bool]
    ) -> None:
        self._callbacks = callbacks
        self._wanted = wanted
        self._before: bool | None = None

    # A backward pass in a compiled function nests compilations. If dynamo compiled these methods in
    # turn, it would deadlock on the lock that it holds meanwhile.
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
        # Without the flag, code that needs a data-dependent size would come after a graph break.
        if before is False and isinstance(error, GuardOnDataDependentSymNode):
            raise UserError(UserErrorType.DYNAMIC_CONTROL_FLOW, str(error)) from error


def _backends() -> Iterator[Any]:
    """The backend of dynamo's calling frame, and the backends that it wraps."""
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
    """Make dynamo set the flag from now on when it traces for a backend that wants it.

    A function that then needs a data-dependent size runs in Python, like other code that dynamo
    does not support; the functions it calls are compiled.
    """
    handler: Any = callback.callback_handler
    plain = handler.install_callbacks
    handler.install_callbacks = disable(lambda *args: _Compilation(plain(*args), wanted))
