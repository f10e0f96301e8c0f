"""Measuring through TVM's RPC tracker: one with a server, both on this machine."""

from __future__ import annotations

import socket
import time

import pytest
import scipy.sparse as sp

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.planning.plan import plan_of, requested
from sparsetir.planning.request import Request
from sparsetir.records.task import Reference
from sparsetir.schedules.templates.spmv import SlicedRows
from sparsetir.tuning.case import OperatorCase, stored_bytes
from sparsetir.tuning.measure import Measurer
from sparsetir.tuning.remote import Remote, RemoteDevice, RemoteError
from tuning import faulty_templates as faulty

HOST, KEY = "127.0.0.1", "this-machine"
TARGET = {"kind": "llvm", "mcpu": "x86-64-v3"}


def task(op: str = "spmm", feat: int = 32, dtype: str = "float32", **options) -> Request:
    a = sp.random_array((300, 200), density=0.05, format="csr", dtype="float32", rng=0)
    return requested(op, SparseMatrix(a), feat, dtype=dtype, target=TARGET, threads=1, **options)


def free_port() -> int:
    with socket.socket() as server:
        server.bind((HOST, 0))
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    """A device known to a tracker."""
    from tvm import rpc
    from tvm.rpc.tracker import Tracker

    try:
        port = free_port()
    except OSError as error:
        pytest.skip(f"ports cannot be opened: {error}")
    without_torch = tmp_path_factory.mktemp("path")  # which takes longer to load than all else
    (without_torch / "torch.py").write_text("raise ImportError('not here')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(without_torch))
        patch.setenv("TVM_NUM_THREADS", "1")
        tracker = Tracker(HOST, port, port + 100, silent=True)
        port = free_port()
        at_tracker = {"key": KEY, "tracker_addr": (HOST, tracker.port)}
        server = rpc.Server(HOST, port, port + 100, silent=True, **at_tracker)
    device = Remote(HOST, tracker.port, KEY)
    end = time.monotonic() + 30
    while True:
        try:
            RemoteDevice(device, None)._tracker().close()
            break
        except RemoteError:
            assert time.monotonic() < end
            time.sleep(0.1)
    yield device
    server.terminate()
    tracker.terminate()


@pytest.mark.parametrize(
    ("op", "dtype", "options", "config"),
    [
        ("spmm", "bfloat16", {"reduce": "max", "heads": 2}, None),
        pytest.param("sddmm", "float16", {"heads": 2}, None, marks=pytest.mark.slow),
        ("spmv", "float32", {"reduce": "mean"}, None),
        ("spmv", "float32", {}, SlicedRows(packed=True)),
    ],
)
@pytest.mark.slow
def test_every_operator_on_a_device(remote, op, dtype, options, config) -> None:
    """The last kernel takes only a part of what is computed."""
    of_task = task(op, 1 if op == "spmv" else 32, dtype, **options)
    first = of_task.chosen()
    config = config or first
    device = RemoteDevice(remote, OperatorCase(of_task))
    device.begin(60.0)
    outcome = device.measure(config, None)
    assert outcome.state == "ok" and 0 < outcome.seconds <= outcome.median < 0.1
    plan = plan_of(of_task, config)
    assert outcome.bytes == stored_bytes(plan)
    assert (outcome.padding, outcome.launches) == (plan.padding, 1)
    signature = plan.kernel.signature
    assert config is first or len(signature.passed) < len(signature.position)
    device.release()


@pytest.mark.slow
def test_a_device_is_measured_as_this_machine_is(remote) -> None:
    with Measurer(task(), remote=remote, modules=("tuning.faulty_templates",)) as measurer:
        outcome = measurer.measure(faulty.RIGHT)
        assert outcome.state == "ok" and outcome.seconds > 0, outcome
        assert outcome.compile_seconds > 0 and outcome.bytes > 0 and outcome.extra["times"] > 3
        assert measurer.measure(faulty.RIGHT, best=1e-9).state == "pruned"
        outcome = measurer.measure(faulty.Wrong())
        assert outcome.state == "wrong" and "the first at" in outcome.message
        beside = measurer.measure(faulty.RIGHT, None, Reference(faulty.RIGHT, seconds=100.0))
        assert beside.state == "ok"
        assert beside.seconds > beside.extra["measured"]  # which no clock has seen

        with pytest.raises(RemoteError, match="has no such device; those it has: this-machine"):
            RemoteDevice(Remote(HOST, remote.port, "another"), None)

        # The last test: TVM's server does not outlive it.
        outcome = measurer.measure(faulty.Wild())
        assert outcome.state == "crashed" and "a crash there" in outcome.message
        with pytest.raises(RuntimeError, match="no such device; those it has: none"):
            measurer.measure(faulty.RIGHT)


def test_a_tracker_that_is_not_there() -> None:
    port = free_port()
    with pytest.raises(RemoteError, match=f"'x' of the tracker {HOST}:{port}: the tracker cannot"):
        RemoteDevice(Remote(HOST, port, "x"), None)
