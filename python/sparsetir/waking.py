"""From how much work on the other threads of a CPU are woken, by what waking costs on this machine.

A worker of TVM's pool sleeps between calls, so that it disturbs no other library's threads. To wake
it takes some 5 to 50 microseconds, on virtual machines more than on others. Two threads then save
`work * seconds * (1 - 1 / threads)` and lose that. Both numbers are measured when a plan is first
made for which the answer is open, and kept beside the records of tuning: for a month, unless the
versions of sparsetir or TVM change before, or other processes used the machine meanwhile.
"""

from __future__ import annotations

import json
import os
import time
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sparsetir._versions import VERSIONS
from sparsetir.schedules.default import pool
from sparsetir.schedules.versions import WORK_OF_THREADS
from sparsetir.tuning.files import write_whole
from sparsetir.tuning.fingerprint import cpu_model
from sparsetir.tuning.records import default_path

__all__ = ["measure", "pays", "work_of_threads"]

# Multiplications below which waking pays on no machine, and above which it does on each.
LEAST, MOST = 1 << 16, 1 << 24
SIZE, FEAT = 512, 32
FEW, MANY = 64, 26_000  # elements: no work to speak of, and some tens of microseconds
ROUNDS = 300
PAUSE = 50e-6  # seconds between calls, after which a worker sleeps
KEPT_DAYS = 30
# Processes that want to run, for each core, from which on a machine is too busy to be measured.
BUSY = 0.5
_measuring = False


def pays(threads: int, work: int) -> bool:
    """Whether to wake the other threads, if there are any, for so many multiplications."""
    return threads > 1 and work >= work_of_threads(threads, work)


def work_of_threads(threads: int, work: int) -> int:
    """Multiplications from which on waking the other threads pays.

    work : that it is asked for; where no machine would wake them for it, or each would, nothing is
        measured

    Where records are switched off nothing is kept, so nothing is measured: the answer is then what
    has been found on several machines. So it is where TVM's pool has fewer threads than are asked
    for, as with OMP_NUM_THREADS=1: there is nobody to wake, and what is measured would be kept for
    processes that have them.
    """
    if _measuring or threads < 2 or not LEAST <= work < MOST or default_path() is None:
        return WORK_OF_THREADS
    if pool() < threads:
        return WORK_OF_THREADS
    return _kept(threads, str(default_path()))


@cache
def _kept(threads: int, records: str) -> int:
    """From the file, measured where it is not there."""
    path = Path(records).with_name("waking.json")
    key = f"{cpu_model()}, {threads} threads, spin {os.environ.get('TVM_THREAD_POOL_SPIN_COUNT')}"
    try:
        found = _readable(path)[key]
        age = date.today() - date.fromisoformat(found["date"])
        work = found["work"] if found["versions"] == VERSIONS else None
        if isinstance(work, int) and LEAST <= work <= MOST and abs(age.days) <= KEPT_DAYS:
            return work
    except (KeyError, TypeError, ValueError):
        pass
    load = os.getloadavg()[0]
    found = {**measure(threads), "load": load, "date": str(date.today()), "versions": VERSIONS}
    if load > max(1.0, BUSY * (os.cpu_count() or 1)):
        return int(found["work"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({**_readable(path), key: found}, indent=1) + "\n")
    except OSError:  # a folder that is not ours: it is measured again in the next process
        pass
    return int(found["work"])


def _readable(path: Path) -> dict[str, Any]:
    """What is in the file; nothing where it is damaged."""
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def measure(threads: int) -> dict[str, Any]:
    """Seconds to wake the other threads, and of a multiplication, and the "work" where they meet.

    Times of products with few elements, on one thread and on all, and of one with many; calls take
    turns, and of each the lower quartile counts, as others may use the machine. Takes about a
    second, most of it to compile two kernels.
    """
    global _measuring
    _measuring = True
    try:
        calls = _calls(threads)
    finally:
        _measuring = False
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            until = time.perf_counter() + PAUSE
            while time.perf_counter() < until:
                pass
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
    seconds = {name: float(np.quantile(times, 0.25)) for name, times in taken.items()}
    return break_even(seconds["few"], seconds["few, all"], seconds["many"], threads)


def break_even(few: float, few_all: float, many: float, threads: int) -> dict[str, Any]:
    """The same, of seconds of calls; the work is at least LEAST and at most MOST."""
    waking = max(0.0, few_all - few)
    each = max(1e-13, (many - few) / ((MANY - FEW) * FEAT))
    work = waking / (each * (1 - 1 / threads))
    return {"waking": waking, "multiplication": each, "work": int(min(max(work, LEAST), MOST))}


def _calls(threads: int) -> dict[str, Any]:
    import scipy.sparse as sp

    from sparsetir.plan import plan
    from sparsetir.schedules.templates.spmm import RowBlocks

    b, out = np.ones((SIZE, FEAT), "float32"), np.empty((SIZE, FEAT), "float32")
    alone = RowBlocks(tile=FEAT, lanes=16, tiles_first=False, prefetch=0, parallel=False)
    every = RowBlocks(tile=FEAT, lanes=16, tiles_first=False, prefetch=0, blocks=threads)

    def call(elements: int, config: Any) -> Any:
        rng = np.random.default_rng(0)
        a = sp.random_array(
            (SIZE, SIZE), density=elements / SIZE**2, format="csr", dtype="float32", rng=rng
        )
        run = plan("spmm", a, FEAT, dtype="float32", threads=threads, config=config)
        return lambda: run(b, out=out)

    return {"few": call(FEW, alone), "few, all": call(FEW, every), "many": call(MANY, alone)}
