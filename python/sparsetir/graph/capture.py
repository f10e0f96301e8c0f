"""Torch's flag for operators whose results' sizes follow from contents, set for one backend alone.

Self loops that are taken out of edges are such: without the flag they break a model into several
graphs, as they do not under torch.compile(fullgraph=True). Dynamo reads the flag when it traces,
long before it calls a backend, and the flag makes Inductor fail on models that it compiles
without; so what dynamo calls when it begins asks for which backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo import callback, config, disable

FLAG = "capture_dynamic_output_shape_ops"
# Attributes by which torch's wrappers of a backend hold it.
INNER = ("_torchdynamo_orig_backend", "compiler_fn")


class _Kept(list[Any]):
    """Callbacks of which the first stays when torch forgets the others."""

    def clear(self) -> None:
        del self[1:]


class _Flag:
    """The flag, as it was before."""

    def __init__(self, wanted: Callable[[Any], bool]) -> None:
        self._wanted = wanted
        self._before: bool | None = None

    def begin(self, _: Any = None) -> None:
        """Set the flag where dynamo begins to trace for a backend that wants it."""
        if any(map(self._wanted, _backends())):
            self._before = getattr(config, FLAG)
            setattr(config, FLAG, True)

    def end(self, _: Any = None) -> None:
        """Set the flag back."""
        if self._before is not None:
            setattr(config, FLAG, self._before)
            self._before = None


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
    """Set the flag from now on where dynamo traces for a backend that wants it."""
    # Dynamo holds a lock while it calls these, also in a backward pass inside of a compiled
    # function: to compile them in turn would wait for that lock forever.
    handler, flag = callback.callback_handler, _Flag(wanted)
    handler.start_callbacks = _Kept([disable(flag.begin), *handler.start_callbacks])
    handler.end_callbacks = _Kept([disable(flag.end), *handler.end_callbacks])
