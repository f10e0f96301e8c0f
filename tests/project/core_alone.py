"""A program that tries the core, and the answers of its doors to extensions, without these.

Arguments are the modules that must be absent. It checks results itself, and prints a line for each
door: its name and "open", or the error of a door whose extension is absent.
"""

import contextlib
import io
import sys
from importlib.util import find_spec

import numpy as np
import scipy.sparse as sp
import torch
import tvm

import sparsetir
from compile_cache import Cache
from sparsetir import nn, ops
from sparsetir.cli import main, tune

# isort: split
from tvm.script import sparse_tir as T


@T.prim_func
def scaled(
    a: T.handle, x: T.handle, y: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32,
):  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    JD = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    X = T.match_sparse_buffer(x, (JD,), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J], "SR", "scaled") as [i, j]:
        with T.init():
            Y[i] = 0.0
        Y[i] = Y[i] + A[i, j] * X[j] * T.float32(2)


class Layer(torch.nn.Module):
    """Messages along edges, and a linear map."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x, source, target):
        sums = torch.zeros_like(x).index_add(0, target, x[source])
        return torch.relu(self.linear(sums))


rng = np.random.default_rng(0)
A = sp.random_array((40, 40), density=0.1, format="csr", dtype="float32", rng=rng)
X, Y = (rng.standard_normal((40, 8)).astype("float32") for _ in range(2))
DENSE, TENSORS = A.toarray(), [torch.from_numpy(x) for x in (X, Y)]
MATRIX = sparsetir.SparseMatrix(A)


def same(got, expected):
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-4, atol=1e-5)


def check_programs():
    y = np.zeros(40, "float32")
    arguments = {"a": A.data, "x": X[:, 0].copy(), "y": y, "indptr": A.indptr, "indices": A.indices}
    kernel = sparsetir.build(scaled)
    kernel(**arguments)
    same(y, 2 * A @ X[:, 0])
    y[:] = 0
    sparsetir.interpret(scaled, arguments)
    same(y, 2 * A @ X[:, 0])


def check_operators():
    same(sparsetir.plan("spmm", A, 8)(X), A @ X)
    same(ops.spmm(MATRIX, TENSORS[0]), A @ X)
    sampled = (X @ Y.T)[DENSE != 0]
    same(sparsetir.plan("sddmm", A, 8)(X, Y), sampled)
    same(ops.sddmm(MATRIX, *TENSORS), sampled)
    same(sparsetir.plan("spgemm", A, A)().to_scipy().toarray(), (A @ A).toarray())
    same(sparsetir.einsum("Y[i, k] = A[i, j] * X[j, k]", A=MATRIX, X=X), A @ X)


def check_models():
    torch.manual_seed(0)
    model = Layer()
    edges = torch.from_numpy(np.stack(MATRIX.pattern.coords).astype("int64"))
    expected = model(TENSORS[0], *edges)
    got = torch.compile(model, backend="sparsetir")(TENSORS[0], *edges)
    same(got.detach(), expected.detach())
    layer = nn.GCNConv(8, 4)
    assert layer(TENSORS[0], edges).shape == (40, 4)


def check_search():
    tuned = sparsetir.tune("spmm", A, 8, trials=2, threads=1)
    assert [trial.outcome.state for trial in tuned.trials] == ["ok"] * 2, tuned.failures
    same(sparsetir.plan("spmm", A, 8, config=tuned.best.config)(X), A @ X)


def check_command_line():
    for words, text in (
        (["lower", "spmm", "--stage", "3"], "def spmm("),
        (["formats", "cora"], "default on this CPU"),
    ):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main(words) == 0
        assert text in printed.getvalue(), printed.getvalue()


GPU = {"kind": "cuda", "arch": "sm_80"}
# By extension, what asks for it.
DOORS = {
    "GPUs": [
        lambda: sparsetir.plan_candidates("spmm", A, 8, target=GPU),
        lambda: sparsetir.plan_candidates("spgemm", A, A, target=GPU),
        lambda: sparsetir.horizontal_fuse,
    ],
    "processes": [lambda: sparsetir.distributed],
    "points": [lambda: nn.SparseConv3d, lambda: nn.SparsePoints],
    "masks": [lambda: ops.sparse_attention, lambda: sparsetir.masks],
    "Relax": [lambda: sparsetir.export],
    "plotting": [lambda: MATRIX.plot(), lambda: sparsetir.plot],
    "remote tuning": [lambda: tune._remote("host:1:key")],
}

if __name__ == "__main__":
    tvm.compile = Cache.shared().compile
    for name in sys.argv[1:]:
        with contextlib.suppress(ModuleNotFoundError):  # of a folder above
            assert find_spec(name) is None, name
    for check in (
        check_programs, check_operators, check_models, check_search, check_command_line,
    ):  # fmt: skip
        check()
    for name, doors in DOORS.items():
        for door in doors:
            try:
                door()
                print(f"{name}: open")
            except ImportError as error:
                print(f"{name}: {error}")
