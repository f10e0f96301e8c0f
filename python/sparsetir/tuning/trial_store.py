"""Storage of the trials of a search in an Optuna study, shared with later runs and processes.

A config is a running trial of the study while it is measured, with its data as a user attribute,
and its outcome as another one afterwards. The trial of a killed process stays running, and is tried
again when it is older than a measurement may take; no other trial is lost or repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

import optuna
from optuna.trial import TrialState

from sparsetir.records.task import OK, PRUNED, Config, Outcome
from sparsetir.runtime.file_errors import first_line
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.search.configs import from_data, to_data
from sparsetir.tuning.propose import Tried, quiet
from sparsetir.tuning.tuned import Trial

T = TypeVar("T")
MAX_NAME = 500  # last characters of a study's name that are used, within Optuna's limit
CONFIG, OUTCOME = "config", "outcome"  # user attributes
STATES = {OK: TrialState.COMPLETE, PRUNED: TrialState.PRUNED}  # others are FAIL


class TrialStore:
    """Trials by number; not thread-safe.

    name : name of the study
    storage : an SQLite file; the URL of a database in Optuna's form; None for memory only
    default : the reference config of all others, which each process measures itself
    patience : seconds in which any measurement ends

    If the database fails, trials are kept in memory from then on, with an entry in `warnings`; a
    URL that cannot be opened is a ValueError.
    """

    def __init__(
        self, name: str, storage: Path | str | None, default: Config, patience: float
    ) -> None:
        self.warnings: list[str] = []
        self._default, self._patience = default, timedelta(seconds=patience)
        self._done: dict[int, Trial] = {}
        # Trials of this process: the config, and Optuna's trial, if there is one.
        self._mine: dict[int, tuple[Config, optuna.Trial | None]] = {}
        self._others: list[Config] = []
        self._study: optuna.Study | None = None
        try:
            if storage is not None:
                self._study = _opened(name, storage)
        except Exception as error:
            if not isinstance(storage, Path):
                expected = "the URL of a database that can be opened"
                raise wrong("tune", "storage", expected, first_line(error)) from error
            try:
                time.sleep(1.0)  # another search may just have created the tables of the file
                self._study = _opened(name, storage)
            except Exception as error:
                self._drop_database(error)
        self.refresh()

    def done(self) -> list[Trial]:
        """Finished trials by number."""
        return [trial for _, trial in sorted(self._done.items())]

    def default_trial(self) -> Trial | None:
        """The first trial of the default config."""
        return next((trial for trial in self.done() if trial.config == self._default), None)

    def tried(self) -> list[Tried]:
        """Finished trials by number, and those being measured."""
        running = (*(config for config, _ in self._mine.values()), *self._others)
        return [*((t.config, t.outcome) for t in self.done()), *((c, None) for c in running)]

    def measures(self, config: Config) -> bool:
        """Whether this process is measuring a config."""
        return any(own == config for own, _ in self._mine.values())

    def refresh(self) -> None:
        """Read the trials of other processes."""
        self._others = []
        trials = self._asked(lambda study: study.get_trials(deepcopy=False))
        for trial in trials or ():
            if trial.number in self._done or trial.number in self._mine:
                continue
            try:
                config = from_data(trial.user_attrs[CONFIG])
                if OUTCOME in trial.user_attrs:
                    fields = dict(trial.user_attrs[OUTCOME])
                    when, outcome = fields.pop("when"), Outcome(**fields)
                    self._done[trial.number] = Trial(trial.number, config, outcome, when)
                    continue
            except (KeyError, TypeError, ValueError):  # of another version
                continue
            if trial.state == TrialState.RUNNING and config != self._default:
                start = trial.datetime_start or datetime.min
                if datetime.now() - start < self._patience:
                    self._others.append(config)

    def claim(self, config: Config) -> int:
        """Start a trial for a config and return its number."""

        def ask(study: optuna.Study) -> optuna.Trial:
            trial = study.ask()
            trial.set_user_attr(CONFIG, to_data(config))
            return trial

        trial = self._asked(ask)
        number = max((*self._done, *self._mine), default=-1) + 1
        if trial is not None:
            number = trial.number
        self._mine[number] = config, trial
        return number

    def finish(self, number: int, outcome: Outcome, when: float) -> Trial:
        """Store the outcome of a trial; when : seconds since the start of the search."""
        config, stored = self._mine.pop(number)
        trial = self._done[number] = Trial(number, config, outcome, when)
        if stored is not None:

            def tell(study: optuna.Study) -> None:
                stored.set_user_attr(OUTCOME, {"when": when, **asdict(outcome)})
                seconds = outcome.seconds if outcome.state == OK else None
                study.tell(stored, seconds, STATES.get(outcome.state, TrialState.FAIL))

            self._asked(tell)
        return trial

    def close(self) -> None:
        """Free the configs that this run has claimed but not finished."""
        for _, stored in self._mine.values():
            if stored is not None:
                self._asked(lambda study, own=stored: study.tell(own, state=TrialState.FAIL))
        self._mine = {}

    def _asked(self, action: Callable[[optuna.Study], T]) -> T | None:
        """The result of `action` on the study; None without one, or if its database fails."""
        try:
            with quiet():
                return None if self._study is None else action(self._study)
        except Exception as error:  # of any database: measurements must not be lost
            self._drop_database(error)
            return None

    def _drop_database(self, error: Exception) -> None:
        self._study = None
        self.warnings.append(
            f"trials are kept in memory only, their database failed: {first_line(error)}"
        )


def forget(name: str, storage: Path) -> None:
    """Delete a study from a file, if there is one."""
    with quiet(), suppress(KeyError):
        optuna.delete_study(study_name=name[-MAX_NAME:], storage=_url(storage))


def _opened(name: str, storage: Path | str) -> optuna.Study:
    if isinstance(storage, Path):
        storage.parent.mkdir(parents=True, exist_ok=True)
    with quiet():
        return optuna.create_study(
            storage=_url(storage),
            study_name=name[-MAX_NAME:],
            direction="minimize",
            sampler=optuna.samplers.RandomSampler(),  # unused: `Proposer` proposes
            load_if_exists=True,
        )


def _url(storage: Path | str) -> str:
    return f"sqlite:///{storage.absolute()}" if isinstance(storage, Path) else storage
