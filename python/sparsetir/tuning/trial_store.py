"""The trials of a search, where later runs and other processes find them: an Optuna study.

A trial is claimed in one write, with its config, its point and who measures it; then gets its
outcome; then its state. What a killed process leaves is a claim of nobody, or an outcome without a
state: the next one to look finishes the second and frees the first.

Why not Optuna's own heartbeat, RetryHeartbeatStaleTrialCallback and MaxTrialsCallback (as of 5.0;
tests/tuning/test_optuna_storage.py shows each of these, and fails once it is no longer so):

- Two processes may be given the same config: nothing in a study is unique, and GridSampler hands
  out again what is being measured. Here a claim that is not the first of its config is taken back.
- A process killed before its first heartbeat leaves a trial that is running for ever: without a
  heartbeat none is stale. Here the trial is created with the name of who measures it.
- One killed between failing a stale trial and adding its retry loses the trial: they are two
  transactions, and what has failed is not looked at again. Here a killed trial stays a reason to
  try its config again until that has been measured.
- Who is late with a heartbeat (a stopped process, a machine that slept) has its trial retried, and
  its result refused: measured twice. Here the system of the machine is asked who still runs; time
  counts for claims of other machines alone.
- The limit of trials counts finished ones, so that processes at the same time pass it. Here those
  that are being measured count too.

What Optuna's would do better: a machine that is gone is noticed as soon as its heartbeat is late;
here a claim from another machine lasts for twice the time limit of a config and ten minutes
(:class:`sparsetir.tuning.owner.Owner`), by clocks that are taken to agree.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState, create_trial

from sparsetir.records.task import OK, PRUNED, Outcome
from sparsetir.schedules.search.configs import from_data
from sparsetir.schedules.search.spaces import Space
from sparsetir.tuning.owner import Owner
from sparsetir.tuning.propose import Candidate, Tried, candidate, distributions, quiet

# States of an entry.
RUNNING, DONE, FREED, KILLED = "running", "done", "freed", "killed"
# Ends of a run in mid-measurement, after which the config is to blame.
KILLS = 2
MAX_NAME = 500  # characters of a study's name, less than Optuna's limit
BUSY_SECONDS = 60.0
CONNECT_SECONDS = 5  # that a server has to answer; they are integers for its drivers
SERVERS = ("postgresql", "mysql", "mariadb")


@dataclass(frozen=True)
class Entry:
    """A trial as it is stored.

    state : RUNNING; DONE, with an outcome; FREED, given up before its end; KILLED with its process
    when : seconds from the start of the search, earlier runs included
    """

    number: int
    key: str
    config: Any
    data: dict[str, Any]
    point: dict[str, Any] | None
    state: str
    claim: dict[str, Any]
    outcome: Outcome | None = None
    when: float = 0.0

    @property
    def tried(self) -> Tried:
        """What a sampler learns from it."""
        return Tried(self.key, self.point, self.outcome)


class TrialStore:
    """Trials by number; not for several threads at once.

    name : of the study: what is tuned
    url : of the database, as SQLAlchemy takes it; None: memory only
    owner : who makes claims
    required : whether a database that cannot be opened is an error

    Where the database fails, trials are kept in memory from then on, and `warnings` says so.
    Raises ValueError for what is no URL or needs a package that is not installed, RuntimeError
    where the database is required and cannot be opened.
    """

    def __init__(
        self, name: str, url: str | None, space: Space, owner: Owner, required: bool = False
    ) -> None:
        self.entries: dict[int, Entry] = {}
        self.warnings: list[str] = []
        self._space, self._owner, self._url = space, owner, url
        self._study: Any = None
        self._storage: Any = None
        if url is not None:
            file = _sqlite_file(url)
            try:
                with quiet(), _alone(file):
                    _repeated(lambda: self._open(name, url))
            except _errors() as error:
                if required:
                    raise RuntimeError(
                        f"tune: argument 'storage': cannot open {_shown(url)!r}: "
                        f"{_cause(error, url)}"
                    ) from None  # whose text may have the password
                self._lose(error)
        self.refresh()

    def close(self) -> None:
        """Free what this run has claimed and not measured to the end; what is known stays known."""
        self.refresh()
        for entry in list(self.entries.values()):
            if entry.state == RUNNING and entry.claim["run"] == self._owner.run:
                self.free(entry)
        if self._storage is not None:
            self._storage.remove_session()
            self._storage.engine.dispose()
            self._study = self._storage = None

    def done(self) -> list[Entry]:
        """Finished trials by number."""
        return [e for _, e in sorted(self.entries.items()) if e.state == DONE]

    def taken(self) -> list[Entry]:
        """Trials that are finished or being measured, by number."""
        return [e for _, e in sorted(self.entries.items()) if e.state in (DONE, RUNNING)]

    def killed(self) -> list[Entry]:
        """Trials that ended with their process."""
        return [e for _, e in sorted(self.entries.items()) if e.state == KILLED]

    def refresh(self) -> None:
        """Read what other processes did, and free what they left."""
        if self._study is None:
            return
        trials = self._try(lambda: self._study.get_trials(deepcopy=False))
        for trial in trials or ():
            known = self.entries.get(trial.number)
            if known is not None and known.state != RUNNING:
                continue
            entry = self._entry(trial)
            if entry is not None:
                self.entries[entry.number] = entry
        for entry in list(self.entries.values()):
            if entry.state == RUNNING and not Owner.lives(entry.claim):
                self._clear(entry)

    def claim(self, given: Candidate) -> Entry | None:
        """A new trial for a config; None where another process has just claimed it."""
        number = max(self.entries, default=-1) + 1
        claim = self._owner.claim()
        entry = Entry(number, given.key, given.config, given.data, given.point, RUNNING, claim)
        if self._study is not None:
            created = self._try(lambda: self._create(entry))
            if created is not None:
                entry = replace(entry, number=created)
                self.refresh()
        self.entries[entry.number] = entry
        # Of several claims the first counts: each process sees at least those before its own.
        same = [e.number for e in self.taken() if e.key == entry.key]
        if min(same) < entry.number:
            self.free(entry)
            return None
        return entry

    def finish(self, entry: Entry, outcome: Outcome, when: float) -> Entry:
        """Store what became of a trial."""
        entry = replace(entry, state=DONE, outcome=outcome, when=when)
        self.entries[entry.number] = entry
        self._write(entry, "outcome", {"when": when, **asdict(outcome)})
        return entry

    def free(self, entry: Entry) -> None:
        """Give a claim up: the config may be tried again, by whomever."""
        entry = replace(entry, state=FREED)
        self.entries[entry.number] = entry
        self._write(entry, "freed", True)

    def _clear(self, entry: Entry) -> None:
        """Deal with a claim whose process has ended."""
        if entry.outcome is not None:  # killed between two writes
            self.finish(entry, entry.outcome, entry.when)
            return
        before = sum(e.key == entry.key for e in self.killed())
        if before + 1 < KILLS:
            killed = replace(entry, state=KILLED)
            self.entries[entry.number] = killed
            if not self._write(killed, "killed", True):
                del self.entries[entry.number]  # to be read again
            return
        message = f"the run ended {before + 1} times while this config was measured"
        self.finish(entry, Outcome("crashed", message=message), entry.when)

    def _open(self, name: str, url: str) -> None:
        name, storage = _short(name), _storage(url)
        self._study = optuna.create_study(
            storage=storage, study_name=name, direction="minimize", load_if_exists=True
        )
        self._study_id = storage.get_study_id_from_name(name)
        self._storage = storage

    def _entry(self, trial: FrozenTrial) -> Entry | None:
        """A stored trial; None for what is not ours, such as a config of another version."""
        found = trial.user_attrs
        try:
            config = from_data(found["config"])
        except (KeyError, ValueError):
            return None
        given = candidate(config, self._space.point(config))
        state, outcome, when = RUNNING, None, 0.0
        if "outcome" in found:
            known = {field.name for field in fields(Outcome)}
            outcome = Outcome(**{k: v for k, v in found["outcome"].items() if k in known})
            when = found["outcome"]["when"]
        if "killed" in found:
            state = KILLED
        elif "freed" in found:
            state = FREED
        elif trial.state.is_finished():
            state = FREED if outcome is None else DONE
        return Entry(
            trial.number, given.key, config, given.data, given.point, state, found["claim"],
            outcome, when,
        )  # fmt: skip

    def _create(self, entry: Entry) -> int:
        """A trial in the database; its number."""
        attributes = {"config": entry.data, "claim": entry.claim}
        known = None if entry.point is None else distributions(self._space, entry.point)
        parameters = entry.point if known is not None else {}
        try:
            made = self._insert(attributes, parameters, known or {})
        except ValueError:
            # A parameter had other choices when the study began, which Optuna refuses. Without
            # parameters its own plots miss the trial; we go by the attributes.
            made = self._insert(attributes, {}, {})
        return self._storage.get_trial_number_from_id(made)

    def _insert(self, attributes: Any, parameters: Any, known: Any) -> int:
        trial = create_trial(
            state=TrialState.RUNNING, user_attrs=attributes, params=parameters, distributions=known
        )
        return self._storage.create_new_trial(self._study_id, template_trial=trial)

    def _write(self, entry: Entry, attribute: str, value: Any) -> bool:
        """An attribute, and the end of the trial; False where that has ended before."""
        if self._study is None:
            return True
        state, values = TrialState.FAIL, None
        if entry.state == DONE and entry.outcome is not None:
            # Failures are FAIL, for Optuna's tools to show as such. That its samplers would then
            # not learn from them does not matter: `Proposer` tells them another way.
            if entry.outcome.state == PRUNED:
                state = TrialState.PRUNED
            elif entry.outcome.state == OK:
                state, values = TrialState.COMPLETE, [entry.outcome.seconds]

        def write() -> None:
            storage = self._storage
            made = storage.get_trial_id_from_study_id_trial_number(self._study_id, entry.number)
            storage.set_trial_user_attr(made, attribute, _plain(value))
            storage.set_trial_state_values(made, state, values)

        try:
            self._try(write)
        except optuna.exceptions.UpdateFinishedTrialError:
            return False  # its process was quicker, or another that clears up
        return True

    def _try(self, action: Callable[[], Any]) -> Any:
        """What `action` gives; where the database fails to the end, None, and memory from now."""
        try:
            with quiet():
                return _repeated(action)
        except _errors() as error:
            self._lose(error)
            return None

    def _lose(self, error: BaseException) -> None:
        self._study = self._storage = None
        self.warnings.append(
            f"trials are kept in memory only, their database failed: {_cause(error, self._url)}"
        )


def _repeated(action: Callable[[], Any]) -> Any:
    """What `action` gives, the second time if not the first.

    A server may be away for a moment; two machines may make the same tables at the same time.
    """
    try:
        return action()
    except _errors():
        time.sleep(1.0)
        return action()


def _plain(data: Any) -> Any:
    """As JSON holds it."""
    return json.loads(json.dumps(data, default=str))


def _errors() -> tuple[type[BaseException], ...]:
    """What Optuna and SQLAlchemy raise where a database fails."""
    from sqlalchemy.exc import SQLAlchemyError

    return (optuna.exceptions.StorageInternalError, SQLAlchemyError, OSError)


def forget(name: str, url: str) -> None:
    """Delete a study, if there is one."""
    with quiet(), _alone(_sqlite_file(url)):
        try:
            optuna.delete_study(study_name=_short(name), storage=_storage(url))
        except KeyError:
            pass


def _short(name: str) -> str:
    if len(name) <= MAX_NAME:
        return name
    return name[: MAX_NAME - 33] + "/" + sha256(name.encode()).hexdigest()[:32]


def _storage(url: str) -> Any:
    options: dict[str, Any] = {"pool_pre_ping": True}
    if url.startswith("sqlite"):
        options = {"connect_args": {"timeout": BUSY_SECONDS}}
    elif url.startswith(SERVERS):
        options["connect_args"] = {"connect_timeout": CONNECT_SECONDS}
    return optuna.storages.RDBStorage(url, engine_kwargs=options)


def _cause(error: BaseException, url: str | None) -> str:
    """One line of what the database said, without the password."""
    cause = error.__cause__ or error
    line = str(getattr(cause, "orig", None) or cause).splitlines()[0]
    word = re.search("://[^:/@]*:(.*)@", url or "")
    return _shown(line.replace(word[1], "***") if word and word[1] else line)


def _shown(url: str) -> str:
    """A URL for people and reports, without passwords."""
    url = re.sub("://([^:/@]*):.*@", r"://\1:***@", url)
    return re.sub("((?:password|passwd|pwd)=)[^&]*", r"\1***", url, flags=re.IGNORECASE)


def _sqlite_file(url: str) -> Path | None:
    """The file of a database; None for another kind. ValueError for what is no URL."""
    from sqlalchemy import create_engine
    from sqlalchemy.exc import ArgumentError

    try:
        found = create_engine(url).url
    except ImportError as error:
        advice = ""
        if url.startswith("postgres"):
            advice = "; run `pip install 'sparsetir[postgresql]'` and begin it with postgresql+psycopg://"
        raise ValueError(
            f"tune: argument 'storage': {_shown(url)!r} needs a package: {error}{advice}"
        ) from error
    except (ArgumentError, ValueError, TypeError) as error:
        raise ValueError(
            f"tune: argument 'storage': expected the URL of a database, got {_shown(url)!r}: "
            f"{_cause(error, url)}"
        ) from None  # whose text may have the password
    named = found.database if found.get_backend_name() == "sqlite" else None
    if named in (None, "", ":memory:"):
        return None
    if not Path(named).name:
        raise ValueError(f"tune: argument 'storage': expected a file, got {named!r}")
    return Path(named)


@contextmanager
def _alone(file: Path | None) -> Iterator[None]:
    """While no other process makes the tables in the same SQLite file."""
    try:
        import fcntl
    except ImportError:  # not POSIX, where nothing is measured either
        file = None
    if file is None:
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(file.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
