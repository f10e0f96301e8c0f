"""Which config to try next: Optuna's samplers over the points of a space."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from sparsetir.records.task import OK, PRUNED, Config, Outcome
from sparsetir.schedules.search.configs import to_data
from sparsetir.schedules.search.spaces import Space
from sparsetir.schedules.template import Point

# Proposals of known configs in a row, after which one is drawn from those not yet tried.
REPEATS = 12
# Trials of the sampler's own that are random; what it is given first counts as well.
STARTUP_TRIALS = 10


@dataclass(frozen=True)
class Candidate:
    """A config of a space.

    key : equal for equal configs
    point : None for a config from outside the space
    """

    config: Config
    data: dict[str, Any]
    key: str
    point: Point | None


@dataclass(frozen=True)
class Tried:
    """A point that a sampler learns from, and its outcome (None: is being measured)."""

    key: str
    point: Point | None
    outcome: Outcome | None


def candidate(config: Config, point: Point | None) -> Candidate:
    """A config with its data."""
    data = to_data(config)
    return Candidate(config, data, json.dumps(data, sort_keys=True), point)


class Proposer:
    """Gives configs to try.

    What comes next depends on the seed and on what was tried alone, so that a search which goes on
    after an interruption tries what it would have tried without.

    sampler : "tpe", "random" or "exhaustive"
    first : configs to try before any other, in this order
    """

    def __init__(self, space: Space, sampler: str, seed: int, first: Iterable[Config]) -> None:
        self._space, self._sampler, self._seed = space, sampler, seed
        self._branches = {branch.name: branch for branch in space.branches}
        self._first = [candidate(config, space.point(config)) for config in first]

    @cached_property
    def all(self) -> list[Candidate]:
        """Every config of the space."""
        return [candidate(config, point) for point, config in self._space.points()]

    def next(self, tried: Sequence[Tried]) -> Candidate | None:
        """A config that is not among the tried; None where there is none left."""
        taken = {trial.key for trial in tried}
        for given in self._first:
            if given.key not in taken:
                return given
        if self._sampler != "exhaustive":
            found = self._sampled(tried, taken)
            if found is not None:
                return found
        left = [given for given in self.all if given.key not in taken]
        if not left:
            return None
        return left[0] if self._sampler == "exhaustive" else self._random(tried).choice(left)

    def _random(self, tried: Sequence[Tried]) -> random.Random:
        return random.Random(self._seed_after(tried))

    def _seed_after(self, tried: Sequence[Tried]) -> int:
        return (self._seed * 100_003 + len(tried)) % 2**32

    def _sampled(self, tried: Sequence[Tried], taken: set[str]) -> Candidate | None:
        """A config from a study made for this question alone: vain questions leave no trace."""
        with quiet():
            study = _study(self._optuna_sampler(self._seed_after(tried)))
            study.add_trials(self._learned(tried))
            for _ in range(REPEATS):
                trial = study.ask()
                point = self._suggest(trial)
                config = self._space.config(point)
                if config is None:
                    study.tell(trial, float("inf"))
                    continue
                # Several points may give a config. A later run knows the first of them alone.
                found = candidate(config, self._space.point(config))
                if found.key not in taken:
                    return found
                # A known config stays a running trial, which the sampler keeps away from. Told
                # once more what it takes, the sampler would hold on to it.
        return None

    def _optuna_sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        if self._sampler == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.TPESampler(
            seed=seed,
            multivariate=True,
            group=True,
            constant_liar=True,
            n_startup_trials=STARTUP_TRIALS,
        )

    def _suggest(self, trial: optuna.Trial) -> Point:
        name = trial.suggest_categorical("template", list(self._branches))
        point: Point = {"template": name}
        for choice, values in self._branches[name].choices.items():
            point[f"{name}.{choice}"] = trial.suggest_categorical(f"{name}.{choice}", values)
        return point

    def _learned(self, tried: Sequence[Tried]) -> Iterator[FrozenTrial]:
        for trial in tried:
            known = None if trial.point is None else distributions(self._space, trial.point)
            if trial.point is None or known is None:
                continue
            if trial.outcome is None:
                state, value = TrialState.RUNNING, None
            else:
                state, value = TrialState.COMPLETE, _value(trial.outcome)
            yield create_trial(state=state, value=value, params=trial.point, distributions=known)


def distributions(space: Space, point: Point) -> dict[str, Any] | None:
    """Optuna's description of a point's parameters; None where the space has no such point."""
    names = tuple(branch.name for branch in space.branches)
    branch = next((b for b in space.branches if b.name == point.get("template")), None)
    if branch is None:
        return None
    choices = {"template": names}
    choices.update({f"{branch.name}.{name}": tuple(v) for name, v in branch.choices.items()})
    if set(choices) != set(point) or any(point[name] not in choices[name] for name in choices):
        return None
    return {name: CategoricalDistribution(values) for name, values in choices.items()}


def importances(space: Space, tried: Sequence[Tried]) -> dict[str, float]:
    """How much each parameter decided among the configs that ran, all together 1; largest first."""
    ran = []
    for trial in tried:
        known = None if trial.point is None else distributions(space, trial.point)
        if known is not None and trial.outcome is not None and trial.outcome.seconds is not None:
            seconds = trial.outcome.seconds
            ran.append(create_trial(value=seconds, params=trial.point, distributions=known))
    if len(ran) < 2:
        return {}
    with quiet():
        warnings.simplefilter("ignore")  # that few trials make it inaccurate
        study = _study(None)
        study.add_trials(ran)
        found = optuna.importance.get_param_importances(study)
    return {name: float(value) for name, value in found.items()}


def _value(outcome: Outcome) -> float:
    """The number that the sampler minimises; failures are worse than all others."""
    if outcome.state in (OK, PRUNED) and outcome.seconds is not None:
        return outcome.seconds
    return float("inf")


def _study(sampler: optuna.samplers.BaseSampler | None) -> optuna.Study:
    storage = optuna.storages.InMemoryStorage()
    return optuna.create_study(storage=storage, sampler=sampler, direction="minimize")


@contextmanager
def quiet() -> Iterator[None]:
    """Without Optuna's messages and its warnings of experimental features."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
