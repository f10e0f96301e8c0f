"""sparsetir as a peer: the one place that knows how its operators are called."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.libraries import Calls, Peer, output
from sparsetir.planning.compiled import compilations
from sparsetir.planning.plan import plan, plan_candidates
from sparsetir.schedules.search.configs import from_data, to_data
from sparsetir.tuning.case import Case, array, numbers

TUNING = 0.02  # seconds for each candidate


class Ours(Peer):
    """Plans, with the default config and, where the option `tune` is given, the fastest one.

    The option `plans` names a JSON file instead: {"target": as for `plan`, "modules": those to
    import before, "configs": {name: what schedules.configs.to_data gave}}; there is a way by each
    of these names.
    """

    def __init__(self, threads: int, options: dict[str, str]) -> None:
        super().__init__(threads, options)
        self._about: dict[str, Any] = {}

    def prepare(self, case: Case) -> Calls:
        """Calls into a given result."""
        operands = [array(x, case.dtype) for x in case.operands]
        if "plans" in self.options:
            plans, tuning = self._named(case, Path(self.options["plans"])), {}
        else:
            plans, tuning = {"default": self._plan(case, None)}, {}
        if "tune" in self.options:
            start = time.perf_counter()
            plans["tuned"] = self._tuned(case, operands)
            tuning = {"tune_seconds": time.perf_counter() - start}
        self._about = {"plans": {n: describe(p) for n, p in plans.items()}, **tuning}

        def call(plan: Any) -> Callable[[], Any]:
            out = array(output(case), case.dtype)
            return lambda: plan(*operands, out=out)

        return {name: call(plan) for name, plan in plans.items()}

    def _plan(self, case: Case, config: Any, target: Any = "llvm") -> Any:
        options = self._options(case)
        return plan(case.op, case.matrix, case.feat, **options, target=target, config=config)

    def _options(self, case: Case) -> dict[str, Any]:
        about = {k: getattr(case, k) for k in ("dtype", "reduce", "heads")}
        return {**about, "threads": self.threads}

    def _named(self, case: Case, path: Path) -> dict[str, Any]:
        """The plans that a file describes."""
        given = json.loads(path.read_text())
        for name in given["modules"]:
            import_module(name)
        return {
            name: self._plan(case, from_data(data), given["target"])
            for name, data in given["configs"].items()
        }

    def _tuned(self, case: Case, operands: list[Any]) -> Any:
        """The fastest plan of all candidates, each tried for a moment."""
        out = array(output(case), case.dtype)
        best, fastest = None, float("inf")
        for config in plan_candidates(case.op, case.matrix, case.feat, **self._options(case)):
            plan = self._plan(case, config)
            plan(*operands, out=out)
            end = time.perf_counter() + TUNING
            while time.perf_counter() < end:
                start = time.perf_counter()
                plan(*operands, out=out)
                taken = time.perf_counter() - start
                if taken < fastest:
                    best, fastest = plan, taken
        return best

    def about(self) -> dict[str, Any]:
        """Of each plan its config, what it cost, launches and padding."""
        return self._about

    def compilations(self) -> int:
        """Kernels that were compiled in this process."""
        return compilations()

    def to_numpy(self, result: Any) -> np.ndarray:
        """Also of TVM's tensors."""
        return numbers(result)


class OursFloat32(Ours):
    """What a user would call without kernels of half precision: the same numbers as float32."""

    def prepare(self, case: Case) -> Calls:
        """Calls into a given float32 result."""
        return super().prepare(dataclasses.replace(case, dtype="float32"))


def describe(plan: Any) -> dict[str, Any]:
    """What JSON files hold of a plan."""
    config = to_data(plan.config)
    told = ("convert_seconds", "compile_seconds", "launches", "padding")
    about = {k: getattr(plan, k) for k in told}
    return {"template": config.pop("template"), "config": config, **about}
