"""Torch's flag for operators whose results' sizes follow from contents, set for one backend alone.

Self loops that are taken out of edges are such: without the flag they break a model into several
graphs, as they do not under torch.compile(fullgraph=True). Dynamo reads the flag when it traces,
long before it calls a backend, and the flag makes Inductor fail on models that it compiles
without; so what dynamo calls when it begins asks for which backend.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch._dynamo import callback, config

FLAG = "capture_dynamic_output_shape_ops"
# Attributes by which torch's wrappers of a backend hold it, and of backends that ask for the flag.
INNER = ("_torchdynamo_orig_backend", "compiler_fn")
MARK = "captures_dynamic_sizes"


class _Kept(list[Any]):
    """Callbacks of which the first stays when torch forgets the others."""

    def clear(self) -> None:
        del self[1:]


class _Flag:
    """The flag, as it was before."""

    def __init__(self) -> None:
        self._before: bool | None = None

    def begin(self, _: Any = None) -> None:
        """Set the flag if it is for a backend that asks for it that dynamo begins to trace."""
        if any(getattr(backend, MARK, False) for backend in _backends()):
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


def install() -> None:
    """Watch what dynamo compiles; once."""
    handler, flag = callback.callback_handler, _Flag()
    handler.start_callbacks = _Kept([flag.begin, *handler.start_callbacks])
    handler.end_callbacks = _Kept([flag.end, *handler.end_callbacks])
