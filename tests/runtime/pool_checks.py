"""Checks that `test_pool.py` runs, each in a process: `python pool_checks.py NAME`."""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir.extras import allow_torch

if "torch later" in sys.argv:  # as TVM would import it
    sys.modules["torch"] = None  # type: ignore[assignment]

# isort: split
from tvm.script import tirx as T

from sparsetir.runtime import pool

ROWS, COLUMNS, FEAT = 900, 700, 32
pool.WORK_OF_THREADS = dict.fromkeys(pool.KINDS, 0)  # short loops wake threads, too


@T.prim_func(s_tir=True)
def positive(x: T.handle, n: T.int32):
    X = T.match_buffer(x, (n,), "int32")
    for i in T.parallel(n):
        assert X[i] >= 0, "a task failed on purpose"
        X[i] = X[i] + 1


@T.prim_func(s_tir=True)
def doubled(a: T.handle, b: T.handle, n: T.int32):
    A = T.match_buffer(a, (n,), "float32")
    B = T.match_buffer(b, (n,), "float32")
    for i in T.parallel(n):
        with T.sblock("s"):
            v = T.axis.spatial(n, i)
            B[v] = A[v] * T.float32(2)


def products() -> list[Callable[[], bool]]:
    """Calls of kernels with parallel loops, which say whether they were right."""
    from sparsetir.schedules.templates.row_tile import RowTile

    rng = np.random.default_rng(0)
    a = sp.random_array((ROWS, COLUMNS), density=0.02, format="csr", dtype="float32", rng=rng)
    b, wanted = np.ones((COLUMNS, FEAT), "float32"), a @ np.ones((COLUMNS, FEAT), "float32")
    checks = []
    for blocks in (2, 7):
        config = RowTile(tile=32, lanes=16, tiles_first=False, prefetch=0, blocks=blocks)
        plan = sparsetir.plan("spmm", a, feat=FEAT, threads=blocks, config=config)
        checks.append(lambda plan=plan: np.allclose(plan(b), wanted, atol=1e-4))
    kernel, x = sparsetir.build(doubled), rng.random(100_003, dtype="float32")

    def plain() -> bool:
        y = np.zeros_like(x)
        kernel(x, y)
        return bool((y == 2 * x).all())

    return [*checks, plain]


def right(calls: list[Callable[[], bool]]) -> None:
    assert all(call() for call in calls), pool.threads()


def use(kind: int) -> None:
    """An environment variable as if the user had set it."""
    launcher, why = pool._launcher()
    assert launcher is not None, why
    library = pool._openmp() if kind == pool.OPENMP else None
    launcher.use(kind, library, late=pool.NEVER)  # whatever other programs do


def torch_first() -> None:
    import torch

    launcher, why = pool._launcher()
    assert launcher is not None, f"not with this TVM: {why}"
    calls = products()
    assert pool.threads()[:2] == ("openmp", 2) and "gomp" in pool.threads().library
    assert pool.threads().why == "it is torch's"
    right(calls)
    for n in (1, 4, 1, 3, 2):
        torch.set_num_threads(n)
        assert pool.threads().count == n
        right(calls)
    for kind in (pool.TVM, pool.SERIAL, pool.OPENMP):
        use(kind)
        right(calls)


def settled(choice: str = "", most: str = "2") -> tuple[str, int]:
    """The pool and threads chosen with these variables."""
    os.environ.update({"SPARSETIR_POOL": choice, "TVM_NUM_THREADS": most})
    pool._state.settled = False
    return sparsetir.threads()[:2]


def torch_later() -> None:
    """Variables choose, too; the smaller number of threads counts."""
    assert sys.modules["torch"] is None
    calls, kernel = products(), sparsetir.build(doubled)
    right(calls)
    without = "tvm" if ctypes.util.find_library("gomp") is None else "openmp"
    assert pool.threads().pool == without
    assert without == "tvm" or pool.threads().why == "torch is not loaded"
    choices = {"": without, "openmp": without, "tvm": "tvm", "serial": "serial"}
    for choice, wanted in choices.items():
        assert settled(choice)[0] == wanted
        right(calls)
    assert "SPARSETIR_POOL says so" in sparsetir.threads().why
    settled()
    allow_torch()
    import torch

    assert not pool._state.with_torch
    x, y = torch.ones(1000), torch.zeros(1000)
    kernel(x, y)  # which was made before
    assert pool._state.with_torch and (y == 2).all()
    assert pool.threads().pool == "openmp"
    right(calls)  # of kernels made before
    for choice in ("", "openmp", "tvm", "serial"):
        assert settled(choice)[0] == (choice or "openmp")
        right(calls)
    for most, of_torch in (("1", 2), ("2", 1), ("3", 2), ("2", 4), ("9" * 30, 2)):
        torch.set_num_threads(of_torch)
        assert settled(most=most) == ("openmp", min(int(most), of_torch))
        right(calls)
    try:
        settled("mine")
    except ValueError as error:
        assert "SPARSETIR_POOL: expected openmp, tvm, serial, got 'mine'" in str(error)
    else:
        raise AssertionError("expected an error")


def errors() -> None:
    """No pool loses an exception, in twenty calls each, or keeps it alive.

    On OpenMP's threads one takes milliseconds.
    """
    import torch

    torch.set_num_threads(2)
    kernel = sparsetir.build(positive)
    for kind in (pool.TVM, pool.OPENMP, pool.SERIAL):
        use(kind)
        for bad in ([], [0], [999], [0, 999]):
            for _ in range(20):
                x = np.zeros(1000, "int32")
                x[bad] = -1
                try:
                    kernel(x)
                except Exception as error:
                    assert bad and "a task failed on purpose" in str(error)
                else:
                    assert not bad, (kind, "an error was lost")
    use(pool.OPENMP)

    def fail(times: int) -> int:
        for _ in range(times):
            try:
                kernel(-np.ones(1000, "int32"))
            except Exception:
                continue
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    assert fail(30) + 100 > fail(150)  # KiB


def python_threads() -> None:
    import torch

    torch.set_num_threads(2)
    calls = products()
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(10):
            wrong.extend(call for call in calls if not call())

    def swap() -> None:
        for n in range(150):
            use((pool.TVM, pool.OPENMP, pool.SERIAL)[n % 3])
            time.sleep(1e-3)

    workers = [threading.Thread(target=f) for f in (work, work, work, work, swap)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def forks() -> None:
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(2)
    calls = products()
    right(calls)
    torch.mm(torch.randn(500, 500), torch.randn(500, 500))
    child = os.fork()
    if not child:
        fine = all(call() for call in calls) and pool.threads()[:2] == ("serial", 1)
        fine = fine and all(call() for call in products())  # made in the child
        os._exit(0 if fine else 3)
    assert os.waitpid(child, 0)[1] == 0
    right(calls)
    assert pool.threads().pool == "openmp"
    assert [int(item) for item in DataLoader(Items(), num_workers=2)] == [1] * 6


def spawned() -> None:
    """A start method that imports everything in each worker."""
    from torch.utils.data import DataLoader

    loader = DataLoader(Items(), num_workers=2, multiprocessing_context="spawn")
    assert [int(item) for item in loader] == [1] * 6


class Items:
    """A dataset: 1 where a product in a worker was right, on one thread."""

    calls: list[Any] = []

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if not self.calls:
            self.calls.extend(products())
        return int(all(call() for call in self.calls) and pool.threads().count == 1)


@cache
def doubling() -> sparsetir.Kernel:
    return sparsetir.build(doubled)


def on_two_threads() -> tuple[Any, Any, Any]:
    """A kernel, the launcher on OpenMP's threads, and what it knows of the pool."""
    import torch

    torch.set_num_threads(2)
    kernel = doubling()
    use(pool.OPENMP)
    launcher, _ = pool._launcher()
    assert launcher is not None
    launcher._resume.value = 0  # of other programs
    return kernel, launcher, pool._Pool.from_address(launcher._slot.value)


def others() -> None:
    """Modules that others load keep TVM's launcher."""
    import tvm

    kernel, launcher, fields = on_two_threads()
    launches = [0]
    real = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)

    @real
    def spy(*words: Any) -> None:
        launches[0] += 1
        real(parallel)(*words)

    parallel, fields.parallel = fields.parallel, ctypes.cast(spy, ctypes.c_void_p).value
    x, y = np.ones(1000, "float32"), np.zeros(1000, "float32")
    kernel(x, y)
    assert launches == [1] and (y == 2).all()
    compiled = tvm.compile(tvm.IRModule({"doubled": doubled.with_attr("global_symbol", "doubled")}),
                       target=kernel.target)  # fmt: skip
    compiled["doubled"](x, y, 1000)
    assert launches == [1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.so"
        kernel.export(path)
        opened = sparsetir.load(path)
        opened(x, y)
        assert launches == [2] and (y == 2).all()
        module = tvm.runtime.load_module(str(path))
        module["doubled"](x, y, 1000)
        assert launches == [2]


def late_starts() -> None:
    """A thread that starts late makes loops run on one for a while; uneven work does not."""
    kernel, launcher, fields = on_two_threads()
    number = ctypes.CFUNCTYPE(ctypes.c_int)
    me = number(fields.thread_num)

    @number
    def slow() -> int:
        late = me()
        if late:
            time.sleep(0.005)
        return late

    x, y = np.ones(1000, "float32"), np.zeros(1000, "float32")
    fields.limit = pool.LATE
    was, fields.thread_num = fields.thread_num, ctypes.cast(slow, ctypes.c_void_p).value
    for _ in range(2):  # the first one may be after a pause
        kernel(x, y)
    fields.thread_num = was
    assert launcher.serial_until() > time.monotonic_ns() + 32e6
    calls = products()
    right(calls)


class Simulated:
    """A pool of two threads in simulated time, in nanoseconds.

    work : that a loop takes one thread
    late : gives by how much the second thread starts late at a time
    """

    def __init__(self, work: float, late: Callable[[float], float]) -> None:
        self.late: Callable[[float], float]
        self.kernel, _, fields = on_two_threads()
        self.work, self.late, self.now, self.pair = int(work), lambda _: 2e4, 10**12, False
        self.arrays = np.ones(1000, "float32"), np.zeros(1000, "float32")
        self.asked = self.thread = 0
        integer, address = ctypes.c_int, ctypes.c_void_p
        parts = {
            "clock": ctypes.CFUNCTYPE(integer, integer, ctypes.POINTER(ctypes.c_int64))(self.time),
            "parallel": ctypes.CFUNCTYPE(None, address, address, integer, integer)(self.run),
            "thread_num": ctypes.CFUNCTYPE(integer)(lambda: self.thread),
            "num_threads": ctypes.CFUNCTYPE(integer)(lambda: 2),
            "max_threads": ctypes.CFUNCTYPE(integer)(lambda: 2),
        }
        self.parts = parts  # alive
        for name, function in parts.items():
            setattr(fields, name, ctypes.cast(function, address).value)
        fields.limit = pool.LATE
        self.call()  # which forgets what was before
        self.late = late

    def time(self, _: int, out: Any) -> int:
        self.asked += 1
        if self.asked == 2 and not self.pair:  # after a loop on one thread
            self.now += self.work
        out[0], out[1] = divmod(self.now, 10**9)
        return 0

    def run(self, function: int, loop: int, *_: int) -> None:
        body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        self.pair, self.thread = True, 0
        body(loop)
        self.now += int(self.late(self.now))
        self.thread = 1
        body(loop)
        self.now += self.work // 2

    def call(self) -> bool:
        """Whether the loop ran on both threads."""
        self.asked, self.pair = 0, False
        self.kernel(*self.arrays)
        return self.pair

    def calls(self, seconds: float, gap: float = 0) -> tuple[float, float]:
        """The share of calls on both threads, and the time of a call beside one thread's."""
        end, both, spent = self.now + seconds * 1e9, [], 0
        while self.now < end:
            begin = self.now
            both.append(self.call())
            spent += self.now - begin
            self.now += int(gap)
        assert (self.arrays[1] == 2).all()
        return sum(both) / len(both), spent / len(both) / self.work


MS = 1e6  # nanoseconds


def busy_for(on: float, off: float, slice: float = 4 * MS) -> Callable[[float], float]:
    """The delay of a thread's start while another program takes its core in part of a period."""

    def late(now: float) -> float:
        left = on - now % (on + off)
        return min(left, slice) if left > 0 else 2e4

    return late


def quiet_machine() -> None:
    assert Simulated(MS, lambda _: 2e4).calls(1) == (1, pytest.approx(0.52))


def busy_machine() -> None:
    """Short loops and long, with pauses and without: at most an eighth is lost, soon less."""
    for work, gap in ((MS, 0), (MS, 20 * MS), (0.3 * MS, 3 * MS)):
        share, time = Simulated(work, lambda _: 4 * MS).calls(4, gap)
        assert share < 0.03 and time < 1.125
    share, time = Simulated(MS, lambda _: 4 * MS).calls(8)
    assert share < 0.01 and time < 1.02


def half_busy_machine() -> None:
    """The second core is found again soon after it is free."""
    share, time = Simulated(MS, busy_for(1000 * MS, 1000 * MS)).calls(8)
    assert share > 0.6 and time < 0.75
    share, time = Simulated(MS, busy_for(10 * MS, 90 * MS)).calls(4)
    assert share > 0.7 and time < 0.75
    for on, off in ((4, 4), (20, 20), (100, 100)):
        for gap in (0, 3 * MS, 20 * MS):
            assert Simulated(MS, busy_for(on * MS, off * MS)).calls(4, gap)[1] < 1.25


def taking_turns() -> None:
    """Late starts after pauses, such as of programs that wait for each other, do not count."""
    first = [True]
    pool_of_two = Simulated(MS, lambda _: 3 * MS if first[0] else 2e4)
    for _ in range(20):
        pool_of_two.now += int(50 * MS)
        for number in range(7):
            first[0] = number == 0
            assert pool_of_two.call()


def another_tvm() -> None:
    """Where TVM's internals have changed, its pool is used, with the reason."""
    import torch
    import tvm_ffi

    assert torch.get_num_threads() == 2
    real = tvm_ffi.get_global_func

    def changed(name: str, *words: Any) -> Any:
        if name == "ffi.Module.load_from_file.ll":
            raise ValueError("no such function")
        return real(name, *words)

    pool.tvm_ffi.get_global_func = changed
    right(products())
    chosen = sparsetir.threads()
    assert chosen.pool == "tvm" and "ValueError: no such function" in chosen.why


# By the processes that they are made in.
SIMULATED = quiet_machine, busy_machine, half_busy_machine, taking_turns
CHECKS = {
    "with torch": (torch_first, forks, errors, python_threads, others, late_starts),
    "in simulated time": SIMULATED,
}
SLOW = {"spawn": (spawned,), "torch later": (torch_later,), "another TVM": (another_tvm,)}

if __name__ == "__main__":
    for check in {**CHECKS, **SLOW}[sys.argv[1]]:
        check()
