"""What Optuna's own claims, heartbeats, retries and limits do not do: why `trial_store.py` does it.

Each test shows one thing; one that fails tells that Optuna does it by now, and that ours may go.
"""

import optuna
import pytest
import sqlalchemy
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback, fail_stale_trials
from optuna.study import MaxTrialsCallback
from optuna.trial import TrialState

pytestmark = [
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
    pytest.mark.filterwarnings("ignore:Heartbeat of storage is supposed"),
]


@pytest.fixture(autouse=True)
def quiet():
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(before)


@pytest.fixture
def study(tmp_path):
    """With a heartbeat, and any number of retries; `study.age()` makes all heartbeats old."""
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    retry = RetryHeartbeatStaleTrialCallback()
    storage = RDBStorage(url, heartbeat_interval=1, heartbeat_stale_trial_callback=retry)
    found = optuna.create_study(storage=storage, sampler=optuna.samplers.RandomSampler(seed=0))

    def age():
        with storage.engine.begin() as connection:
            old = "UPDATE trial_heartbeats SET heartbeat = '2000-01-01 00:00:00'"
            connection.execute(sqlalchemy.text(old))

    found.age, found.beat = age, storage.record_heartbeat
    return found


def states(study):
    return [trial.state for trial in study.get_trials()]


def claim(study):
    """A trial with its first heartbeat, as `Study.optimize` begins it."""
    trial = study.ask()
    trial.suggest_int("tile", 1, 1000)
    study.beat(trial._trial_id)
    return trial


def test_what_it_does(study):
    """A killed process's trial waits to be tried again, once its last heartbeat is old enough."""
    first = claim(study)
    fail_stale_trials(study)
    assert states(study) == [TrialState.RUNNING]
    study.age()
    fail_stale_trials(study)
    assert states(study) == [TrialState.FAIL, TrialState.WAITING]
    assert study.ask().suggest_int("tile", 1, 1000) == first.params["tile"]


def test_a_kill_before_the_first_heartbeat_leaves_a_running_trial_for_ever(study):
    study.ask()
    study.age()
    fail_stale_trials(study)
    assert states(study) == [TrialState.RUNNING]


def test_a_kill_between_failure_and_retry_loses_the_trial(study, monkeypatch):
    """They are two transactions, and what has failed is not looked at again."""
    claim(study)
    study.age()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(study, "add_trial", lambda trial: (_ for _ in ()).throw(KeyboardInterrupt))
        fail_stale_trials(study)
    fail_stale_trials(study)
    assert states(study) == [TrialState.FAIL]


def test_a_late_heartbeat_has_a_trial_measured_twice(study):
    """As where a machine slept, or a stopped process goes on: what it found is refused."""
    trial = claim(study)
    study.age()
    fail_stale_trials(study)
    assert states(study)[-1] == TrialState.WAITING
    with pytest.raises((ValueError, RuntimeError)):
        study.tell(trial, 1.0)


def test_a_config_is_given_to_two_processes(tmp_path):
    """Nothing refuses a config that another is measuring, not even where all are counted out."""
    choices = {"tile": [8, 16]}
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    optuna.create_study(storage=url, study_name="one")
    asked = []
    for seed in range(3):
        sampler = optuna.samplers.GridSampler(choices, seed=seed)
        process = optuna.load_study(storage=url, study_name="one", sampler=sampler)
        asked.append(process.ask().suggest_categorical("tile", choices["tile"]))
    assert set(asked) == {8, 16} and len(asked) == 3


def test_a_limit_of_trials_is_passed_by_processes_at_the_same_time(study):
    once = MaxTrialsCallback(1, states=(TrialState.COMPLETE,))
    other = optuna.load_study(storage=study._storage, study_name=study.study_name)

    def objective(trial):
        if trial.number == 0:  # while this one measures, the other begins and ends
            other.optimize(lambda trial: 1.0, callbacks=[once])
        return 2.0

    study.optimize(objective, callbacks=[once])
    assert states(study) == [TrialState.COMPLETE, TrialState.COMPLETE]
