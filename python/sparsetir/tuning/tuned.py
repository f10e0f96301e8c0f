"""Results of searches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sparsetir.planning.plan import plan_for_callers, plan_of
from sparsetir.planning.request import Request
from sparsetir.planning.run_plan import Plan
from sparsetir.records.record import Key
from sparsetir.records.task import OK, PRUNED, Config, Outcome
from sparsetir.runtime.kernel import Kernel
from sparsetir.schedules.template import Choices
from sparsetir.tuning.program import ProgramTask

# Share of the time that a config must save to beat the default; less may be luck.
MARGIN = 0.02


@dataclass(frozen=True)
class Trial:
    """A tried config and its outcome.

    Parameters
    ----------
    number : int
        Number in the study, from 0.
    config
        A config of a template, or of the user's space.
    outcome : Outcome
        The outcome of the measurement.
    when : float
        Seconds from the start of the search to the end of the trial, including earlier runs.
    """

    number: int
    config: Config
    outcome: Outcome
    when: float


@dataclass
class Search:
    """The result of a search, of an operator or a program.

    Parameters
    ----------
    task
        What was tuned: an operator's request, or a :class:`sparsetir.tuning.program.ProgramTask`.
    key : Key
        The key of its records.
    trials : list of Trial
        All trials of the study, including earlier runs, in the order of their numbers.
    default
        The config of an untuned plan.
    finals : list of Trial
        The default and the best configs, measured once more in turns, which determine `best` and
        `speedup`; empty if the search was interrupted. Seconds of all trials are relative to
        simultaneous calls of the default.
    interrupted : bool
        Whether Ctrl-C ended it.
    warnings : list of str
        Failures besides those of measurements, such as a full disk.
    importances : dict of str to float
        The importance of each parameter of the space (PED-ANOVA); they sum to 1.
    configs : int, optional
        Number of configs in the space, or None if unknown.
    """

    task: Request | ProgramTask
    key: Key
    trials: list[Trial]
    default: Config
    finals: list[Trial] = field(default_factory=list)
    interrupted: bool = False
    warnings: list[str] = field(default_factory=list)
    importances: dict[str, float] = field(default_factory=dict)
    configs: int | None = None

    @property
    def best(self) -> Trial:
        """The fastest trial, or the default's if none is faster by MARGIN.

        Raises RuntimeError if none ran.
        """
        ran = _ran(self.finals) or _ran(self.trials)
        if not ran:
            counts = ", ".join(f"{n} {state}" for state, n in self.counts.items()) or "none tried"
            why = self.first_failure or "no trials"
            raise RuntimeError(f"tune: no config ran ({counts}); the first failure: {why}")
        best = min(ran, key=seconds)
        default = next((t for t in ran if t.config == self.default), best)
        return default if seconds(default) <= (1 + MARGIN) * seconds(best) else best

    @property
    def config(self) -> Config:
        """The best trial's config."""
        return self.best.config

    @property
    def default_seconds(self) -> float | None:
        """Seconds of a call with the default config; None if it did not run."""
        measured = _ran(self.finals) or _ran(self.trials)
        return next((seconds(t) for t in measured if t.config == self.default), None)

    @property
    def speedup(self) -> float | None:
        """The default's seconds over the best's; None if the default did not run."""
        default = self.default_seconds
        return None if default is None else default / seconds(self.best)

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of trials by state."""
        return dict(Counter(trial.outcome.state for trial in self.trials))

    @property
    def failures(self) -> list[Trial]:
        """Trials that are neither successful nor pruned."""
        return [trial for trial in self.trials if trial.outcome.state not in (OK, PRUNED)]

    @property
    def first_failure(self) -> str:
        """The message of the first failed trial that has one, else ""."""
        return next((t.outcome.message for t in self.failures if t.outcome.message), "")

    def __repr__(self) -> str:
        counts = ", ".join(f"{number} {state}" for state, number in self.counts.items())
        text = ""
        if _ran(self.trials):
            text = f": {seconds(self.best) * 1e6:.1f} us, {self.config}"
            if self.speedup is not None:
                text += f", {self.speedup:.2f} times the default's speed"
        if self.first_failure:
            text += f"; the first failure: {self.first_failure}"
        stopped = ", interrupted" if self.interrupted else ""
        return f"<sparsetir.{type(self).__name__} {self.key.op} ({counts}{stopped}){text}>"


@dataclass(repr=False)
class Tuned(Search):
    """Result of :func:`sparsetir.tune` for an operator.

    Parameters
    ----------
    task, key, trials, default, finals, interrupted, warnings, importances, configs
        The same as for :class:`Search`.
    """

    task: Request

    def plan(self) -> Plan:
        """Plan the operator with the best config."""
        return plan_for_callers(self.task, self.config)


@dataclass(repr=False)
class TunedProgram(Search):
    """Result of :func:`sparsetir.tune` for a user's function.

    `sparsetir.build(program, schedule=tuned.schedule, config=tuned.config)` is its kernel.

    Parameters
    ----------
    task, key, trials, default, finals, interrupted, warnings, importances, configs
        The same as for :class:`Search`.
    """

    task: ProgramTask

    @property
    def config(self) -> Any:
        """The best choices as a dict; None if nothing is better than the default schedule."""
        config = self.best.config
        return dict(config) or None if isinstance(config, Choices) else config

    @property
    def schedule(self) -> Callable[..., object] | None:
        """The schedule of the config; None if nothing is better than the default schedule."""
        return None if self.config is None else self.task.apply()

    def kernel(self) -> Kernel:
        """Build the function with the best config.

        The threads of this process run its parallel loops (see :func:`sparsetir.threads`), whatever
        number was tuned for.
        """
        return self.task.build(self.best.config)


@dataclass(repr=False)
class TunedPlan(TunedProgram):
    """Result of :func:`sparsetir.tune` for an operator along edges or of relations.

    Its plain program is tuned like a user's.

    Parameters
    ----------
    task, key, trials, finals, interrupted, warnings, importances, configs
        The same as for :class:`Search`.
    default
        The config of an untuned plan.
    request : Request
        The operator and its sizes.
    """

    request: Request = field(kw_only=True)

    def plan(self) -> Plan:
        """Plan the operator with the best config."""
        return plan_of(self.request, self.best.config)


@dataclass(repr=False)
class TunedSparse(Tuned):
    """The result of :func:`sparsetir.tune` for an operator with a sparse result.

    Parameters
    ----------
    task, key, trials, default, finals, interrupted, warnings, importances, configs
        The same as for :class:`Search`.
    """


def seconds(trial: Trial) -> float:
    """Seconds of a call; infinite if the config did not run."""
    time = trial.outcome.seconds
    return float("inf") if time is None else time


def _ran(trials: list[Trial]) -> list[Trial]:
    return [t for t in trials if t.outcome.state == OK and t.outcome.seconds is not None]
