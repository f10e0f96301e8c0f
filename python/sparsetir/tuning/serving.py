"""The server in a process that answers requests; `process` is the client."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from sparsetir.machine import this_machine
from sparsetir.runtime.file_errors import first_line

KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG: a stopped process does not see that its parent is gone
EVERY = 1.0  # seconds between checks for the parent, if the system does not end orphans


class Missing(Exception):
    """Raised if the requested object does not exist here, which is not an error."""


def serve(answers: int, parent: int, make: Callable[[], object]) -> None:
    """Answer requests until stdin ends: a line when `make` has made the server, then one each.

    A request is {"op": the name of a method, ...its arguments}, an answer the dict it returns:
    {"missing": text} for :class:`Missing`, {"failed": text} for another error.

    answers : file descriptor
    parent : pid of the client, with which this process dies
    """
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    with os.fdopen(answers, "w", buffering=1) as out:
        servers: list[Any] = []
        print(json.dumps(_answer(lambda: servers.append(make()))), file=out)
        gc.freeze()
        gc.enable()
        for line in sys.stdin if servers else ():
            request = json.loads(line)
            op = request.pop("op")
            print(json.dumps(_answer(lambda: getattr(servers[0], op)(**request))), file=out)  # noqa: B023


def one_line(error: BaseException) -> str:
    """The kind of an error and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])


def _answer(action: Callable[[], dict[str, object] | None]) -> dict[str, object]:
    try:
        return action() or {}
    except (Missing, NotImplementedError) as error:
        return {"missing": first_line(error)}
    except Exception as error:  # the parent reports it
        return {"failed": one_line(error)}


def _die_with(parent: int) -> None:
    """Make this process end with the one that started it."""
    if this_machine().system == "linux":
        ctypes.CDLL(None).prctl(KILL_WITH_PARENT, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before the call above took effect


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(EVERY)
    os._exit(1)
