"""Compile the kernels of tests that run in an emulated process of ARM.

`python tests/cross_compiler.py SOCKET` answers `compile_cache.cross_compiled`; `on_arm.sh` starts
and ends it. Emulated, TVM and LLVM take ten times as long.
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Listener
from typing import Any

import tvm

from compile_cache import Cache

TRIPLE = "aarch64-unknown-linux-gnu"


def serve(address: str) -> None:
    """Answer each request in a process of its own."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for these
    with Listener(address, backlog=16) as listener:
        while True:
            with listener.accept() as connection:
                if not os.fork():
                    try:
                        connection.send(_compiled(*connection.recv()))
                    finally:  # without an answer, whoever asked compiles it
                        os._exit(0)


def _compiled(text: str, target: Any, options: Any, quick: bool, library: Any) -> bool:
    cache = Cache(library.parent, tvm.compile)
    cache.quick = quick
    target = tvm.target.Target({"mtriple": TRIPLE, **target})
    return cache.write(tvm.ir.load_json(text), target, options, library)[1]


if __name__ == "__main__":
    serve(sys.argv[1])
