"""The main loop of a search: claim a config, measure it, and store its outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from sparsetir.records.task import OK, PRUNED, Config, Outcome, Reference
from sparsetir.schedules.search.spaces import Space
from sparsetir.tuning.measure import Measurer
from sparsetir.tuning.propose import Proposer, importances
from sparsetir.tuning.trial_store import TrialStore
from sparsetir.tuning.tuned import Trial
from sparsetir.tuning.tuned import seconds as seconds_of

FINALISTS = 3  # besides the default
ROUNDS = 3
# Share of the time limit for trials; the rest is for the finalists.
SEARCH_SHARE = 0.9
WAIT = 0.05  # seconds to wait for another worker


class Run:
    """A search by one process; a context manager.

    name : name of the study: searches of the same name in the same database share their trials
    storage, patience : see :class:`sparsetir.tuning.trial_store.TrialStore`
    sampler, seed, first : see :class:`sparsetir.tuning.propose.Proposer`; the first of `first` is
        the default config
    trials : number of finished trials to reach, including those of earlier runs and other
        processes; None for all configs
    seconds : time limit after which no further trial starts, None for no limit
    progress : see :func:`sparsetir.tune`
    """

    def __init__(
        self,
        name: str,
        storage: Path | str | None,
        space: Space,
        *,
        sampler: str,
        seed: int,
        first: Sequence[Config],
        trials: int | None,
        seconds: float | None,
        patience: float,
        progress: Any = None,
    ) -> None:
        self._start = time.monotonic()
        self._space, self._trials, self._seconds = space, trials, seconds
        self._progress = progress
        self._proposer = Proposer(space, sampler, seed, first)
        self._default = first[0]
        self._store = TrialStore(name, storage, self._default, patience)
        self._before = max((trial.when for trial in self._store.done()), default=0.0)
        self._lock = threading.Condition()
        self._stop = threading.Event()
        self._error: BaseException | None = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self._store.close()

    @property
    def warnings(self) -> list[str]:
        """Failures of the database."""
        return list(self._store.warnings)

    def importances(self) -> dict[str, float]:
        """The importance of each parameter, largest first."""
        return importances(self._space, self._store.tried())

    def search(self, measurers: Sequence[Measurer]) -> None:
        """Run all trials, with a thread for each measurer, or this thread for a single one."""
        if len(measurers) == 1:
            self._work(measurers[0])
            return
        threads = [threading.Thread(target=self._guarded, args=(m,)) for m in measurers]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:  # such as Ctrl-C, which only this thread gets
            self._stop.set()
            for measurer in measurers:
                measurer.interrupt()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            raise
        if self._error is not None:
            raise self._error

    def finals(self, measurer: Measurer) -> list[Trial]:
        """Measure the best few again, against luck; return them with the default, by time."""
        reference, default = self._reference(), self._store.default_trial()
        # Other processes may have measured a config, too.
        best: dict[Config, Trial] = {}
        for trial in sorted(self._ran(), key=seconds_of):
            best.setdefault(trial.config, trial)
        others = [t for config, t in best.items() if config != self._default][:FINALISTS]
        ranked = [default] if default is not None and default.outcome.state == OK else []
        if len(ranked) + len(others) < 2:
            return []
        measured: dict[int, list[Outcome]] = {trial.number: [] for trial in others}
        for turn in range(ROUNDS):
            for trial in others:
                if turn and self._is_past(1.0):
                    break
                measured[trial.number].append(measurer.measure(trial.config, None, reference))
        for trial in others:  # the default keeps its time, as the others are relative to it
            outcome = _merge(measured[trial.number], min if reference is None else median)
            if outcome is not None:
                ranked.append(replace(trial, outcome=outcome))
        return sorted(ranked, key=lambda trial: (trial.outcome.seconds, trial.number))

    def trials(self) -> list[Trial]:
        """All finished trials."""
        return self._store.done()

    def _guarded(self, measurer: Measurer) -> None:
        try:
            self._work(measurer)
        except BaseException as error:  # raised by `search`
            self._error = self._error or error
            self._stop.set()

    def _work(self, measurer: Measurer) -> None:
        while not self._stop.is_set():
            with self._lock:
                claimed = self._next()
                best, reference = self._best(), self._reference()
            if claimed is None:
                return
            number, config = claimed
            # The default is never pruned, as the others are compared with it.
            limit = None if best is None or config == self._default else best.outcome.seconds
            outcome = measurer.measure(config, limit, reference)
            with self._lock:
                if self._stop.is_set() and outcome.state not in (OK, PRUNED):
                    return  # interrupted measurement: `TrialStore.close` frees the config
                self._finish(number, outcome)

    def _next(self) -> tuple[int, Config] | None:
        """Claim the next config; return the number of its trial and it, or None at the end."""
        while not self._stop.is_set():
            self._store.refresh()
            tried = self._store.tried()
            if tried and self._is_past(SEARCH_SHARE):
                return None
            if self._trials is not None and len(tried) >= self._trials:
                return None
            if self._store.measures(self._default):
                # Another worker measures the default, the reference of all other trials.
                self._lock.wait(WAIT)
                continue
            config = self._proposer.next(tried)
            return None if config is None else (self._store.claim(config), config)
        return None

    def _finish(self, number: int, outcome: Outcome) -> None:
        when = self._before + time.monotonic() - self._start
        trial = self._store.finish(number, outcome, when)
        if self._progress is None:
            return
        failures = sum(t.outcome.state not in (OK, PRUNED) for t in self._store.done())
        reference = self._reference()
        seconds = None if reference is None else reference.seconds
        self._progress.step(trial, self._best(), failures, seconds)

    def _reference(self) -> Reference | None:
        """The default as a reference, once it has run."""
        ran = self._store.default_trial()
        if ran is None or ran.outcome.seconds is None:
            return None
        return Reference(self._default, ran.outcome.seconds)

    def _best(self) -> Trial | None:
        return min(self._ran(), key=seconds_of, default=None)

    def _ran(self) -> list[Trial]:
        return [trial for trial in self._store.done() if trial.outcome.state == OK]

    def _is_past(self, share: float) -> bool:
        passed = time.monotonic() - self._start
        return self._seconds is not None and passed >= share * self._seconds


def _merge(outcomes: list[Outcome], of: Callable[[list[float]], float]) -> Outcome | None:
    """Merge outcomes of a config, with the seconds reduced by `of`; None if one failed."""
    seconds = [o.seconds for o in outcomes if o.state == OK and o.seconds is not None]
    if not seconds or len(seconds) < len(outcomes):
        return None
    medians = [outcome.median for outcome in outcomes if outcome.median is not None]
    return replace(outcomes[0], seconds=of(seconds), median=median(medians) if medians else None)
