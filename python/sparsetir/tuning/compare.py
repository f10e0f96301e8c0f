"""The final comparison: named configs beside the libraries that could be called instead."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparsetir.measuring import turns
from sparsetir.measuring.case import Case
from sparsetir.measuring.peers import OURS
from sparsetir.planning.plan import plan
from sparsetir.records.task import OK, Task
from sparsetir.runtime.targets import resolve_target
from sparsetir.schedules.default import is_gpu
from sparsetir.schedules.search.configs import to_data
from sparsetir.tuning.operator_case import case_of
from sparsetir.tuning.tuned import Search, Trial
from sparsetir.tuning.tuned import seconds as seconds_of

DEFAULT = "default"
LIBRARIES = ("scipy", "torch", "mkl")
GPU_LIBRARIES = ("cusparse", "torch")
TITLES = {"scipy": "scipy", "torch": "torch", "mkl": "MKL", "cusparse": "cuSPARSE"}
ROUNDS, SECONDS = 5, 0.015
GPU_CALLS = 20  # in a turn


@dataclass(frozen=True)
class Times:
    """Seconds of a call.

    seconds, median : the least and the median of all calls
    way : which of a library's ways to compute the operator was the fastest
    """

    seconds: float
    median: float
    way: str = ""


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found; keys of the mappings are names of configs and of libraries.

    missing : why a library has no times: it is not installed, or has no such operator
    wrong, failed : what went wrong, also with "sparsetir", all configs together
    """

    configs: Mapping[str, Times] = field(default_factory=dict)
    libraries: Mapping[str, Times] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    wrong: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def vendor(self) -> str | None:
        """The fastest library."""
        return min(self.libraries, key=lambda n: self.libraries[n].seconds, default=None)

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"vendor": self.vendor}


def ranked(tuned: Search) -> list[Trial]:
    """The trials of a search that worked, each config once: the best, then by their times.

    Those that were measured again at its end come first, by these times.
    """
    found: dict[Any, Trial] = {}
    best = [tuned.best] if any(t.outcome.state == OK for t in tuned.trials) else []
    for trials in (best, tuned.finals, tuned.trials):
        worked = [t for t in trials if t.outcome.state == OK]
        for trial in sorted(worked, key=lambda t: (seconds_of(t), t.number)):
            found.setdefault(trial.config, trial)
    return list(found.values())


def finalists(tuned: Search, count: int = 5) -> dict[str, Any]:
    """What to compare after a search: the default, and its best configs from "best 1" on."""
    best = {f"best {n}": t.config for n, t in enumerate(ranked(tuned)[:count], 1)}
    return {DEFAULT: tuned.default, **best}


def compare(
    task: Task, configs: Mapping[str, Any], rounds: int = ROUNDS, seconds: float = SECONDS
) -> Comparison:
    """Times of configs and of scipy, torch and MKL (on a GPU cuSPARSE and torch), in turns.

    Each library runs in a process of its own and those not on turn are stopped, so that threads of
    one do not disturb another. All results are checked against an exact one; what is wrong has no
    times. A config with several names is measured once.

    configs : by name; rounds : turns of each at least; seconds : of a turn

    Raises ValueError for a name with "/".
    """
    for name in configs:
        if "/" in name:
            raise ValueError(f"compare: argument 'configs': expected names without '/', got {name}")
    first: dict[Any, str] = {}
    for name, config in configs.items():
        first.setdefault(config, name)
    distinct = {name: config for config, name in first.items()}
    case = case_of(task)
    if is_gpu(resolve_target(task.target)):
        found = _on_gpu(task, case, distinct, rounds)
    else:
        found = _on_cpu(task, case, distinct, rounds, seconds)
    peers: dict[str, Any] = found["peers"]
    ours = peers.pop(OURS, {}).get("variants", {})
    return Comparison(
        {n: _times(ours[first[c]]) for n, c in configs.items() if first[c] in ours},
        {n: _times(t, t["variant"]) for n, t in peers.items()},
        found["missing"], found["wrong"], found["failed"],
    )  # fmt: skip


def _times(found: Mapping[str, Any], way: str = "") -> Times:
    return Times(found["min"], found["median"], way)


def _on_cpu(
    task: Task, case: Case, configs: Mapping[str, Any], rounds: int, seconds: float
) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparsetir-")))
        plans = folder / "plans.json"
        data = {name: to_data(config) for name, config in configs.items()}
        modules = sorted({type(config).__module__ for config in configs.values()})
        text = json.dumps({"target": task.target, "modules": modules, "configs": data})
        plans.write_text(text)
        workers = [turns.Worker(OURS, task.threads, {"plans": str(plans)})] if configs else []
        workers += [turns.Worker(name, task.threads, {}) for name in LIBRARIES]
        for worker in workers:
            stack.callback(worker.close)
            worker.start()
        reference = turns.shared(case, folder)
        return turns.compare(
            case, workers, folder, rounds, seconds, reference, drop=False
        )  # fmt: skip


def _on_gpu(task: Task, case: Case, configs: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """In this process: there is one stream of calls on the device, whoever makes them."""
    refused = None
    if case.reduce != "sum" or case.heads is not None or case.dtype == "float64":
        refused = "is compared for sums of 16 and 32 bits without heads alone"
    try:
        import torch
    except ImportError:
        refused = "needs torch, which is not installed"
    else:
        if not torch.cuda.is_available():
            refused = "torch finds no CUDA device"
    if refused:
        missing = dict.fromkeys(GPU_LIBRARIES, refused)
        return {"peers": {}, "missing": missing, "wrong": {}, "failed": {}}
    from sparsetir.measuring.gpu import Gpu

    def make(config: Any) -> Callable[[], Any]:
        return lambda: plan(case.op, case.matrix, case.feat, config=config, **task.options)

    plans = {name: make(config) for name, config in configs.items()}
    with torch.no_grad():
        return Gpu(torch, rounds, GPU_CALLS).compare(case, plans, GPU_LIBRARIES)
