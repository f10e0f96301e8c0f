"""A kernel that fails is run once, and its error is the caller's."""

import sys

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetir
from sparsetir import ops
from sparsetir.planning import run_plan
from sparsetir.runtime import kernel_cache
from sparsetir.runtime.kernel import Kernel

A = sp.random_array((30, 20), density=0.2, format="csr", dtype="float32", rng=0)
ROWPTR, COL, VALUES = (torch.from_numpy(x) for x in (A.indptr, A.indices, A.data))
MATRIX = torch.sparse_csr_tensor(ROWPTR, COL, VALUES, A.shape)
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")


class Counted:
    """A stand-in for a compiled function: counts its runs, and raises an error if it has one."""

    def __init__(self, function):
        self.function, self.runs, self.error = function, 0, None

    def __call__(self, *args):
        self.function(*args)  # which refuses what does not fit, before it runs
        self.runs += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def kernels(monkeypatch):
    """All that is compiled."""
    compiled, real = [], kernel_cache.kernel_of

    def counted(stages, target, *, check):
        kernel = real(stages, target, check=check)
        compiled.append(Counted(kernel.entry))
        parts = kernel.name, kernel.signature, kernel.stages, target
        return Kernel({kernel.name: compiled[-1]}, *parts, check=check)

    monkeypatch.setattr(kernel_cache, "kernel_of", counted)
    monkeypatch.setattr(run_plan, "_kernels", type(run_plan._kernels)())
    monkeypatch.setattr(sys.modules["sparsetir.planning.plan"], "_likes", {})
    return compiled


B = torch.randn(20, 16)
READ_ONLY = B.numpy().copy()
READ_ONLY.flags.writeable = False
ERRORS = [RuntimeError("out of memory"), ValueError("of the kernel's own")]


@pytest.mark.parametrize("error", ERRORS, ids=["runtime", "value"])
@pytest.mark.parametrize(
    "call",
    [
        lambda run: run(B.numpy()),
        lambda run: run(B, out=torch.empty(30, 16)),
        lambda run: run(READ_ONLY),  # which takes another view of it
        lambda run: run(B, values=VALUES),
    ],
    ids=["numpy", "torch", "read-only", "values"],
)
def test_by_a_plan(kernels, call, error):
    run = sparsetir.plan("spmm", A, 16)
    (kernel,) = kernels
    call(run)
    kernel.runs, kernel.error = 0, error
    with pytest.raises(type(error), match=str(error)):
        call(run)
    assert kernel.runs == 1
    kernel.error = None
    np.testing.assert_allclose(run(B.numpy()), A @ B.numpy(), atol=1e-5)


@pytest.mark.parametrize("error", ERRORS, ids=["runtime", "value"])
@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("known", [False, True], ids=["first", "again"])
@pytest.mark.parametrize("gradient", [False, True], ids=["plain", "gradient"])
def test_by_an_operator(kernels, reduce, known, gradient, error):
    b = B.clone().requires_grad_(gradient)
    ops.spmm(MATRIX, b, reduce=reduce)
    if not known:
        ops.clear_cache()
    for kernel in kernels:
        kernel.runs, kernel.error = 0, error
    with pytest.raises(type(error), match=str(error)):
        ops.spmm(MATRIX, b, reduce=reduce)
    assert sum(kernel.runs for kernel in kernels) == 1


def test_a_kernel_that_is_called(kernels):
    kernel = sparsetir.plan("spmm", A, 16).kernel
    (counted,) = kernels
    args = {"a": A.data, "indptr": A.indptr, "indices": A.indices, "out": np.empty((30, 16), "f")}
    names = {
        n: B.numpy() if n == "b" else args[n]
        for n in kernel.signature.names
        if n in args or n == "b"
    }
    for error in ERRORS:
        counted.runs, counted.error = 0, error
        with pytest.raises(type(error), match=str(error)):
            kernel(**names)
        assert counted.runs == 1


def test_memory_for_a_result_that_there_is_not(kernels, monkeypatch):
    """Memory is requested once."""
    ops.spmm(MATRIX, B)
    shapes = []

    def refuse(*shape, **options):
        shapes.append(shape)
        raise RuntimeError("cannot allocate")

    monkeypatch.setattr(torch.Tensor, "new_empty", refuse)
    with pytest.raises(RuntimeError, match="cannot allocate"):
        ops.spmm(MATRIX, B)
    assert len(shapes) == 1
