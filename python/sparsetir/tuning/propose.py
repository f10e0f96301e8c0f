"""Which config to try next: Optuna's samplers over the points of a space."""

from __future__ import annotations

import random
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf

import optuna
from optuna.distributions import BaseDistribution, CategoricalChoiceType, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from sparsetir.records.task import Config, Outcome
from sparsetir.schedules.search.spaces import Space
from sparsetir.schedules.template import BRANCH, Point

# Proposals of known configs in a row, after which one is drawn from those not yet tried.
REPEATS = 12
# Trials of the sampler's own that are random; what it is given first counts as well.
STARTUP_TRIALS = 10

# A config and its outcome; None while it is being measured.
Tried = tuple[Config, Outcome | None]


class Proposer:
    """Gives configs to try.

    What comes next depends on the seed and on what was tried alone, so that a search which goes on
    after an interruption tries what it would have tried without.

    sampler : "tpe", "random" or "exhaustive"
    first : configs to try before any other, in this order
    """

    def __init__(self, space: Space, sampler: str, seed: int, first: Sequence[Config]) -> None:
        self._space, self._sampler, self._seed, self._first = space, sampler, seed, first

    def next(self, tried: Sequence[Tried]) -> Config | None:
        """A config that is not among the tried; None where there is none left."""
        taken = {config for config, _ in tried}
        exhaustive = self._sampler == "exhaustive"
        for config in self._first:
            if config not in taken:
                return config
        found = None if exhaustive else self._sampled(tried, taken)
        if found is not None:
            return found
        left = [config for _, config in self._space.points() if config not in taken]
        if not left:
            return None
        return left[0] if exhaustive else random.Random(self._seed_after(tried)).choice(left)

    def _seed_after(self, tried: Sequence[Tried]) -> int:
        return (self._seed * 100_003 + len(tried)) % 2**32

    def _sampled(self, tried: Sequence[Tried], taken: Collection[Config]) -> Config | None:
        """A config from a study made for this question alone: vain questions leave no trace."""
        with quiet():
            study = _study(self._optuna_sampler(self._seed_after(tried)))
            study.add_trials(_trials(self._space, tried))
            for _ in range(REPEATS):
                trial = study.ask()
                config = self._space.config(self._suggest(trial))
                if config is None:
                    study.tell(trial, inf)
                elif config not in taken:
                    return config
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
        names = [branch.name for branch in self._space.branches]
        point: Point = {BRANCH: trial.suggest_categorical(BRANCH, names)}
        for name, values in _choices(self._space, point).items():
            point[name] = trial.suggest_categorical(name, values)
        return point


def _choices(space: Space, point: Point) -> Mapping[str, Sequence[CategoricalChoiceType]]:
    """The values of the parameters that the branch of a point has."""
    branch = next(b for b in space.branches if b.name == point[BRANCH])
    return {f"{branch.name}.{name}": values for name, values in branch.choices.items()}


def _trials(space: Space, tried: Sequence[Tried]) -> Iterator[FrozenTrial]:
    """Trials of a study that minimises seconds, of the configs that a space has.

    Failures are worse than all others. Of the points that give a config it is the first.
    """
    names = [branch.name for branch in space.branches]
    for config, outcome in tried:
        point = space.point(config)
        if point is None:
            continue
        values = {BRANCH: names, **_choices(space, point)}
        known: dict[str, BaseDistribution] = {n: CategoricalDistribution(values[n]) for n in values}
        state, value = TrialState.RUNNING, None
        if outcome is not None:
            state, value = TrialState.COMPLETE, outcome.seconds or inf
        yield create_trial(state=state, value=value, params=point, distributions=known)


def importances(space: Space, tried: Sequence[Tried]) -> dict[str, float]:
    """How much each parameter decided among the configs that ran, all together 1; largest first."""
    ran = [config for config in tried if config[1] is not None and config[1].seconds is not None]
    trials = list(_trials(space, ran))
    if len(trials) < 2:
        return {}
    with quiet():
        warnings.simplefilter("ignore")  # that few trials make it inaccurate
        study = _study(None)
        study.add_trials(trials)
        found = optuna.importance.get_param_importances(study)
    return {name: float(value) for name, value in found.items()}


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
