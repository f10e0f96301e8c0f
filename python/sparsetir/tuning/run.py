"""The course of a search: claim a config, measure it, store what became of it, until the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from sparsetir.records.task import OK, PRUNED, Outcome, Reference
from sparsetir.schedules.search.spaces import Space
from sparsetir.tuning.owner import Owner
from sparsetir.tuning.propose import Proposer, candidate, importances
from sparsetir.tuning.trial_store import RUNNING, Entry, TrialStore
from sparsetir.tuning.tuned import Trial

FINALISTS = 3  # beside the default
ROUNDS = 3
# Of the time allowed, for trials; the rest is for the finalists.
SEARCH_SHARE = 0.9
WAIT = 0.05  # seconds, for what another process does


class Run:
    """A search by one process; a context manager.

    name : of what is tuned: searches of the same name in the same database share their trials
    url : of the database; None: trials are kept in memory
    sampler, seed, first : see :class:`sparsetir.tuning.propose.Proposer`; the first of `first` is
        the default config
    trials : finished ones to have in the end, those of earlier runs and other processes included;
        None: as many as there are configs
    seconds : after which no trial begins but the very first, None for no limit
    patience : seconds in which any measurement ends
    required : whether the search needs the database
    progress : see :func:`sparsetir.tune`
    """

    def __init__(
        self,
        name: str,
        url: str | None,
        space: Space,
        *,
        sampler: str,
        seed: int,
        first: Sequence[Any],
        trials: int | None,
        seconds: float | None,
        patience: float,
        required: bool = False,
        progress: Any = None,
    ) -> None:
        self._start = time.monotonic()
        self._space, self._trials, self._seconds = space, trials, seconds
        self._progress = progress
        self._proposer = Proposer(space, sampler, seed, first)
        self._default = candidate(first[0], None)
        self._owner = Owner(patience)
        self._store = TrialStore(name, url, space, self._owner, required)
        self._before = max((e.when for e in self._store.done()), default=0.0)
        self._lock = threading.Condition()
        self._stop = threading.Event()
        self._error: BaseException | None = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self._store.close()
        self._owner.close()

    @property
    def warnings(self) -> list[str]:
        """What went wrong with the database."""
        return list(self._store.warnings)

    def importances(self) -> dict[str, float]:
        """How much each parameter decided, largest first."""
        return importances(self._space, [entry.tried for entry in self._store.done()])

    def search(self, measurers: Sequence[Any]) -> None:
        """Measure until there is enough; each measurer has a thread, a single one has this."""
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

    def finals(self, measurer: Any) -> list[Trial]:
        """The best few measured again, so that none wins by luck, and the default; by seconds."""
        default, others, reference = *self._finalists(), self._reference()
        if len(default) + len(others) < 2:
            return []
        measured: dict[int, list[Outcome]] = {trial.number: [] for trial in others}
        for turn in range(ROUNDS):
            for trial in others:
                if turn and self._late(1.0):
                    break
                measured[trial.number].append(measurer.measure(trial.config, None, reference))
        found = default  # which takes what it took: the others are measured by it
        for trial in others:
            outcome = _together(measured[trial.number], min if reference is None else median)
            if outcome is not None:
                found.append(replace(trial, outcome=outcome))
        return sorted(found, key=lambda trial: (trial.outcome.seconds, trial.number))

    def trials(self) -> list[Trial]:
        """All that are finished."""
        return [_trial(entry) for entry in self._store.done()]

    def _guarded(self, measurer: Any) -> None:
        try:
            self._work(measurer)
        except BaseException as error:  # raised by `search`
            self._error = self._error or error
            self._stop.set()

    def _work(self, measurer: Any) -> None:
        while not self._stop.is_set():
            with self._lock:
                entry = self._next()
                best, reference = self._best(), self._reference()
            if entry is None:
                return
            # The default is measured to the end: the others are compared with it.
            limit = None if best is None or entry.key == self._default.key else best.outcome.seconds
            outcome = measurer.measure(entry.config, limit, reference)
            with self._lock:
                if self._stop.is_set() and outcome.state not in (OK, PRUNED):
                    return  # ended in mid-measurement: `TrialStore.close` frees the config
                self._finish(entry, outcome)

    def _next(self) -> Entry | None:
        """A config claimed; None at the end."""
        self._store.refresh()
        while not self._stop.is_set():
            taken = self._store.taken()
            if taken and self._late(SEARCH_SHARE):
                return None
            if self._trials is not None and len(taken) >= self._trials:
                return None
            if any(e.key == self._default.key and e.state == RUNNING for e in taken):
                # Somebody else measures what all the others are measured in turns with.
                self._lock.wait(WAIT)
                self._store.refresh()
                continue
            proposed = self._proposer.next([entry.tried for entry in taken], self._again())
            if proposed is None:
                return None
            entry = self._store.claim(proposed)
            if entry is not None and self._trials is not None:
                # Of claims at the same time the first count.
                if sum(e.number < entry.number for e in self._store.taken()) >= self._trials:
                    self._store.free(entry)
                    entry = None
            if entry is not None:
                return entry
        return None

    def _again(self) -> list[Any]:
        """Configs whose measurement ended with its process."""
        return [entry.config for entry in self._store.killed()]

    def _finish(self, entry: Entry, outcome: Outcome) -> None:
        when = self._before + time.monotonic() - self._start
        entry = self._store.finish(entry, outcome, when)
        if self._progress is None:
            return
        done = self._store.done()
        failures = sum(e.outcome.state not in (OK, PRUNED) for e in done if e.outcome)
        reference = self._reference()
        seconds = None if reference is None else reference.seconds
        self._progress.step(_trial(entry), self._best(), failures, seconds)

    def _reference(self) -> Reference | None:
        """The default, once it is known to run."""
        ran = (e.outcome for e in self._store.done() if e.key == self._default.key)
        seconds = next((o.seconds for o in ran if o is not None and o.state == OK), None)
        return None if seconds is None else Reference(self._default.config, seconds)

    def _best(self) -> Trial | None:
        return min(self._ran(), key=lambda trial: trial.outcome.seconds or 0.0, default=None)

    def _ran(self) -> list[Trial]:
        return [_trial(e) for e in self._store.done() if e.outcome and e.outcome.state == OK]

    def _finalists(self) -> tuple[list[Trial], list[Trial]]:
        """The default, if it runs, and the best others."""
        ran = sorted(self._ran(), key=lambda trial: trial.outcome.seconds or 0.0)
        keys = {e.number: e.key for e in self._store.done()}
        default = [trial for trial in ran if keys[trial.number] == self._default.key]
        return default, [trial for trial in ran if trial not in default][:FINALISTS]

    def _late(self, share: float) -> bool:
        passed = time.monotonic() - self._start
        return self._seconds is not None and passed >= share * self._seconds


def _trial(entry: Entry) -> Trial:
    assert entry.outcome is not None
    return Trial(entry.number, entry.config, entry.outcome, entry.when)


def _together(outcomes: list[Outcome], of: Callable[[list[float]], float]) -> Outcome | None:
    """One outcome of several of a config, with the seconds `of` theirs; None where one failed."""
    seconds = [o.seconds for o in outcomes if o.state == OK and o.seconds is not None]
    if not seconds or len(seconds) < len(outcomes):
        return None
    medians = [outcome.median for outcome in outcomes if outcome.median is not None]
    return replace(outcomes[0], seconds=of(seconds), median=median(medians) if medians else None)
