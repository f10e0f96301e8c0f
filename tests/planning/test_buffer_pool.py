"""Memory of sparse results: never shared with a live result, bounded, given back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from sparsetir import SparseMatrix
from sparsetir.runtime import assembled, buffer_pool

HOLDERS: dict[str, Callable[[np.ndarray], Any]] = {
    "a slice": lambda x: x[5:7],
    "another type": lambda x: x.view("int32")[::2].reshape(-1, 2),
    "a tensor": lambda x: torch.from_numpy(x)[3:4],
    "a buffer": memoryview,
    "dlpack": np.from_dlpack,
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep all arrays, up to 1 MiB of them."""
    buffer_pool.release()
    monkeypatch.setattr(buffer_pool, "LEAST", 0)
    monkeypatch.setattr(buffer_pool, "MOST", 1 << 20)
    monkeypatch.setattr(assembled, "COPIED", 0)


def address(array: Any) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.slow
def test_a_room_is_free_when_nobody_has_anything_of_it(holder: str) -> None:
    array = buffer_pool.array((100, 2), np.dtype("float32")).reshape(-1)
    first = address(array)
    held = HOLDERS[holder](array)

    def is_free() -> bool:
        is_same = address(buffer_pool.array((100,), np.dtype("float64"))) == first
        buffer_pool.release()  # what it gave
        return is_same

    assert not is_free()
    del array
    gc.collect()
    assert not is_free()
    del held
    gc.collect()
    assert is_free()


def test_what_is_kept_is_bounded_and_given_back() -> None:
    def at() -> int:
        return address(buffer_pool.array((1 << 17,), np.dtype("float64")))  # 1 MiB

    held = [buffer_pool.array((1 << 17,), np.dtype("float64")) for _ in range(5)]
    last = address(held[-1])
    while held:
        del held[0]
    assert at() == last  # the others are gone
    pair = [
        buffer_pool.array((1 << 17,), np.dtype("float64")),
        buffer_pool.array((1 << 17,), np.dtype("float64")),
    ]
    assert sum(address(x) == last for x in pair) == 1
    del pair
    buffer_pool.release()
    assert buffer_pool.array((1 << 18,), np.dtype("float64")).base is None  # too large to be kept
    buffer_pool.array((4,), np.dtype("float64"))[:] = 3
    small, large = (
        buffer_pool.array((2,), np.dtype("float64")),
        buffer_pool.array((1000,), np.dtype("float64")),
    )
    assert not np.shares_memory(small, large)


def matrices(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 60))
    drawn = [sp.random_array((size, size), density=0.2, format="csr", rng=rng) for _ in range(2)]
    return drawn[0], drawn[1]


def test_results_are_right_while_others_live() -> None:
    """Results of several threads, some held and some dropped at once."""
    wrong: list[Any] = []

    def work(first: int) -> None:
        held = []
        for seed in range(first, first + 40):
            A, B = matrices(seed)
            a, b = SparseMatrix(A), SparseMatrix(B)
            result = (a @ b) @ (a + b)
            held.append((result, (A @ B) @ (A + B)))
            if seed % 3 == 0:
                del held[0]
        wrong.extend(x for x, y in held if not np.allclose(x.to_scipy().toarray(), y.toarray()))

    workers = [threading.Thread(target=work, args=(100 * n,)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_small_result_keeps_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembled, "COPIED", 1 << 10)
    a = SparseMatrix.from_dense(np.eye(3))
    assert (a @ a).values.base is None
    dense = SparseMatrix.from_dense(np.ones((30, 30)))
    assert (dense @ dense).values.base is not None
