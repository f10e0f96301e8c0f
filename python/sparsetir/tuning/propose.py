"""The choice of the next config, by Optuna's samplers over the points of a space."""

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

# Consecutive proposals of known configs, after which an untried one is drawn.
REPEATS = 12
# Random trials before the sampler's model; the initial configs count as well.
STARTUP_TRIALS = 10

# A config and its outcome; None while it is being measured.
Tried = tuple[Config, Outcome | None]


class Proposer:
    """A generator of configs to try.

    The next config depends only on the seed and the tried ones, so that a search which continues
    after an interruption tries the same configs as without.

    sampler : "tpe", "random" or "exhaustive"
    first : configs to try before any other, in this order
    """

    def __init__(self, space: Space, sampler: str, seed: int, first: Sequence[Config]) -> None:
        self._space, self._sampler, self._seed, self._first = space, sampler, seed, first

    def next(self, tried: Sequence[Tried]) -> Config | None:
        """The next untried config, or None if none is left."""
        taken = {config for config, _ in tried}
        exhaustive = self._sampler == "exhaustive"
        for config in self._first:
            if config not in taken:
                return config
        sampled = None if exhaustive else self._sampled(tried, taken)
        if sampled is not None:
            return sampled
        left = [config for _, config in self._space.points() if config not in taken]
        if not left:
            return None
        return left[0] if exhaustive else random.Random(self._seed_after(tried)).choice(left)

    def _seed_after(self, tried: Sequence[Tried]) -> int:
        return (self._seed * 100_003 + len(tried)) % 2**32

    def _sampled(self, tried: Sequence[Tried], taken: Collection[Config]) -> Config | None:
        """A config from a temporary study, so that repeated proposals leave no trace."""
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
                # A known config stays a running trial, which the sampler avoids. If it were told
                # the result once more, the sampler would favour it.
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
    """The values of the parameters of a point's branch."""
    branch = next(b for b in space.branches if b.name == point[BRANCH])
    return {f"{branch.name}.{name}": values for name, values in branch.choices.items()}


def _trials(space: Space, tried: Sequence[Tried]) -> Iterator[FrozenTrial]:
    """Convert tried configs within a space to trials of a study that minimises seconds.

    Failures are worse than all others. Each config is at the first of its points.
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
    """The importance of each parameter among the configs that ran; they sum to 1, largest first."""
    ran = [config for config in tried if config[1] is not None and config[1].seconds is not None]
    trials = list(_trials(space, ran))
    if len(trials) < 2:
        return {}
    with quiet():
        warnings.simplefilter("ignore")  # about few trials
        study = _study(None)
        study.add_trials(trials)
        shares = optuna.importance.get_param_importances(study)
    return {name: float(value) for name, value in shares.items()}


def _study(sampler: optuna.samplers.BaseSampler | None) -> optuna.Study:
    storage = optuna.storages.InMemoryStorage()
    return optuna.create_study(storage=storage, sampler=sampler, direction="minimize")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress Optuna's messages and its warnings about experimental features."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
