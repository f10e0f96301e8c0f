"""Peers that take turns: one process runs at a time, while the others are stopped."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.cases import Case
from bench.peers.libraries import BEFORE, OURS
from bench.timing import rotated, turn_statistics
from sparsetir.extras import WITHOUT_TORCH
from sparsetir.schedules.operators.operands import Check
from sparsetir.tuning.process import THREADS, Ended, Process

LEAST = 3  # calls per turn
QUIET = 4  # the wanted number of undisturbed turns, which then count alone
LONGEST = 2  # the most rounds to reach it, as a multiple
TRIALS = 3  # turns after which a way slower than LATER times the peer's best gets no more
LATER = 1.5
WITH_TORCH = ("torch",)  # peers; importing it would take half of the others' start-up
LAUNCH = "from bench.peers.server import serve_peer; serve_peer(answers, parent, sys.argv[1:])"


class Failed(Exception):
    """A peer that could not do its work; `missing` if that is no fault."""

    def __init__(self, text: str, missing: bool = False) -> None:
        super().__init__(text)
        self.missing = missing


class Worker:
    """A process for a peer with a number of threads, stopped except while it answers.

    Libraries let threads spin for a while after a call; those of a stopped process do not.

    checkout : folder of another version of this project, which `BEFORE` loads
    modules : plug-ins that the process imports
    """

    def __init__(
        self, name: str, threads: int, checkout: Path | None = None, modules: Sequence[str] = ()
    ) -> None:
        self.name, self.threads, self.modules = name, threads, modules
        self.checkout = checkout if name == BEFORE else None
        self._process: Process | None = None
        self.missing: str | None = None

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """An answer; Failed if there is none. A process that died is restarted."""
        if self._process is None and not self.missing:
            self._start()
        if self._process is None:
            raise Failed(self.missing or "", missing=True)
        self._process.resume()
        answer = self._answer(self._process, op, **request)
        self._process.stop()
        if "missing" in answer or "failed" in answer:
            raise Failed(answer.get("missing") or answer["failed"], missing="missing" in answer)
        return answer

    def _start(self) -> None:
        """Start the process, which loads the peer."""
        of = [str(self.checkout / "python"), str(self.checkout)] if self.checkout else []
        env = {
            **os.environ,
            **{n: str(self.threads) for n in THREADS},
            "MKL_DYNAMIC": "FALSE",
            "PYTHONPATH": os.pathsep.join([*of, *(p for p in sys.path if p)]),
            "SPARSETIR_RECORDS": "",  # measures defaults, without records
        }
        code = LAUNCH if self.name in WITH_TORCH else f"{WITHOUT_TORCH}; {LAUNCH}"
        words = [OURS if self.name == BEFORE else self.name, str(self.threads), *self.modules]
        self._process = Process(code, words, environment=env, ahead=True)
        first = self._answer(self._process)
        if "missing" in first or "failed" in first:
            self.close()
            self.missing = first.get("missing")
        else:
            self._process.stop()
        if "failed" in first:
            raise Failed(first["failed"])

    def _answer(self, process: Process, op: str | None = None, /, **request: Any) -> dict[str, Any]:
        try:
            return process.answer() if op is None else process.ask(op, None, **request)
        except Ended as error:
            self.close()
            raise Failed(str(error)) from error

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.end()
            self._process = None


class Times:
    """Nanoseconds of the calls of one way to compute a case, turn by turn.

    A turn is quiet if no involuntary context switch occurred in it. If there are enough quiet
    turns, only they count.
    """

    def __init__(self) -> None:
        self.turns: list[list[int]] = []
        self.quiet: list[list[int]] = []
        self.dropped = False

    def add(self, times: list[int], switches: int) -> None:
        """Record a turn."""
        self.turns.append(times)
        if not switches:
            self.quiet.append(times)

    @property
    def counted(self) -> list[list[int]]:
        """The turns that count."""
        return self.quiet if len(self.quiet) >= QUIET else self.turns

    @property
    def least(self) -> float:
        """The fastest call."""
        return min(map(min, self.counted))

    def summary(self) -> dict[str, float]:
        """Seconds, see `turn_statistics`."""
        times = turn_statistics([[t / 1e9 for t in turn] for turn in self.counted])
        return {**times, "turns": len(self.turns), "quiet": len(self.quiet)}


def compare(
    case: Case, workers: list[Worker], folder: Path, rounds: int, seconds: float, reference: Check
) -> dict[str, Any]:
    """Times of all workers on a case.

    folder : for arrays; `seconds` : per turn

    Ways of a worker that are much slower than its best get only a few turns.
    Returns `peers` (name to its best way: times, `variant`, and those of each way in `variants`;
    `about`), `missing`, `wrong` and `failed` (name to reason). Wrong results are not timed.
    """
    out = Outcome()
    times: dict[Worker, dict[str, Times]] = {}
    described = {k: getattr(case, k) for k in ("op", "feat", "dtype", "reduce", "heads")}
    described["shape"] = case.matrix.shape
    for worker in workers:
        try:
            prepared = worker.ask("prepare", folder=str(folder), case=described)
        except Failed as error:
            out["missing" if error.missing else "failed"][worker.name] = str(error)
            continue
        times[worker] = {}
        for variant in prepared["variants"]:
            result = folder / f"result-{variant}.npy"
            if out.right(worker.name, variant, reference.error(np.load(result))):
                times[worker][variant] = Times()
            result.unlink()
        out["peers"][worker.name] = {k: prepared[k] for k in ("about", "refused")}
    for turn in range(LONGEST * rounds):
        ways = [t for variants in times.values() for t in variants.values() if not t.dropped]
        if turn >= rounds and all(len(t.quiet) >= min(QUIET, rounds) for t in ways):
            break
        for worker in rotated(times, turn):
            try:
                _take_turns(worker, times[worker], seconds)
            except Failed as error:
                out["failed"][worker.name] = str(error)
                times.pop(worker)
    for worker, variants in times.items():
        if variants:
            out.add(worker.name, {name: t.summary() for name, t in variants.items()})
            worker.ask("release")
    return out.with_times()


class Outcome(dict[str, dict[str, Any]]):
    """The results of peers; see `compare`."""

    def __init__(self) -> None:
        super().__init__(peers={}, missing={}, wrong={}, failed={})

    def right(self, peer: str, variant: str, problem: str | None) -> bool:
        """Whether a way of a peer is right; wrong ones are recorded."""
        if problem:
            texts = [self["wrong"][peer]] if peer in self["wrong"] else []
            self["wrong"][peer] = "; ".join([*texts, f"{variant}: {problem}"])
        return not problem

    def add(self, peer: str, variants: dict[str, dict[str, float]]) -> None:
        """Record the times of the ways of a peer; the fastest way counts."""
        best = min(variants, key=lambda v: variants[v]["min"])
        self["peers"][peer] |= {**variants[best], "variant": best, "variants": variants}

    def with_times(self) -> dict[str, dict[str, Any]]:
        """All results, with only those peers that have times."""
        return {**self, "peers": {n: p for n, p in self["peers"].items() if "min" in p}}


def _take_turns(worker: Worker, times: dict[str, Times], seconds: float) -> None:
    """A turn for each way that can still be the fastest of its peer."""
    for variant, timed in times.items():
        if not timed.dropped:
            answer = worker.ask("turn", variant=variant, seconds=seconds, least=LEAST)
            timed.add(answer["times"], answer["switches"])
    for timed in times.values():
        fastest = min(t.least for t in times.values())
        timed.dropped |= len(timed.turns) >= TRIALS and timed.least > LATER * fastest
