"""Processes that run checks together, by gloo on this machine: started once, for many checks.

They are forks of one process that has imported torch and TVM, which takes seconds for each
otherwise, and has done nothing else, so that it has no threads.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which optimizers import
import torch.distributed as dist
import torch.distributed.tensor
import tvm

from compile_cache import Cache

TIMEOUT = 150  # seconds for a check, whose kernels are compiled beside other tests
ALONE = {"OMP_NUM_THREADS": "1", "TVM_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class Team:
    """Processes that run the same check at a time.

    folder : for the file by which they find each other
    seconds : after which the engine gives up
    """

    def __init__(self, size: int, folder: Path, seconds: float = TIMEOUT) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["distributed.team", "distributed.checks"])
        self.pipes, self.processes = [], []
        with _environment():
            for rank in range(size):
                ours, theirs = context.Pipe()
                args = (theirs, rank, size, str(folder / "store"), seconds)
                process = context.Process(target=_serve, args=args, daemon=True)
                process.start()
                self.pipes.append(ours)
                self.processes.append(process)

    def __call__(
        self, check: Callable[..., Any], *args: Any, size: int | None = None,
        seconds: float = TIMEOUT,
    ) -> list[Any]:  # fmt: skip
        """The results of `check(group, *args)` on each of the first `size` processes.

        Raises AssertionError with the traceback of the first that fails.
        """
        self.begin(check, *args, size=size)
        return self.results(size, seconds)

    def begin(self, check: Callable[..., Any], *args: Any, size: int | None = None) -> None:
        """Ask for it."""
        for pipe in self.pipes[:size]:
            pipe.send((check, size or len(self.pipes), args))

    def results(self, size: int | None = None, seconds: float = TIMEOUT) -> list[Any]:
        """The results of the processes; None for one that has ended."""
        answers = []
        for rank, pipe in enumerate(self.pipes[:size]):
            if not pipe.poll(seconds):
                raise AssertionError(f"process {rank} has not answered in {seconds} s")
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append((None, None))
        for rank, (text, _) in enumerate(answers):
            assert text is None, f"on process {rank} of {len(answers)}:\n{text}"
        return [value for _, value in answers]

    def close(self) -> None:
        """End them."""
        for process in self.processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """The environment of the first process, whose forks the others are."""
    before = dict(os.environ)
    os.environ |= {
        **ALONE,
        "SPARSETIR_RECORDS": "",
        "SPARSETIR_KERNELS": "",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


def _serve(pipe: Connection, rank: int, size: int, store: str, seconds: float) -> None:
    tvm.compile = Cache.shared().compile
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size,
        timeout=timedelta(seconds=seconds),
    )  # fmt: skip
    groups = {n: dist.new_group(range(n)) for n in range(1, size)} | {size: dist.group.WORLD}
    while True:
        try:
            check, count, args = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            pipe.send((None, check(groups[count], *args)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
