"""Operators that are a record and a program: plans, torch's side with derived gradients, refusals.

The record of CONTRIBUTING.md, and one that reads values, on the adverse patterns.
"""

import importlib
from functools import cache

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetir
from ops_table import PATTERNS as ALL
from programs import PROGRAMS
from refusals import refuse
from sparsetir import ops
from sparsetir.schedules.operators.gradients import with_names
from sparsetir.schedules.operators.operands import OfProgram, Operator, register
from sparsetir.schedules.operators.registry import OPERATORS
from sparsetir.schedules.template import Choices


@pytest.fixture(scope="module", autouse=True)
def records():
    """Both records, for these tests alone."""
    before = dict(OPERATORS)
    importlib.reload(importlib.import_module("planning.operator_plugin"))
    yield
    OPERATORS.clear()
    OPERATORS.update(before)


def edges(m, n, count, seed=0):
    rng = np.random.default_rng(seed)
    ends = np.stack([rng.integers(0, n, count), rng.integers(0, m, count)])
    return torch.from_numpy(ends)


PATTERNS = {
    name: (*case.shape, case.A[0]) for name, case in ALL.items()
    if isinstance(case.A, tuple) and name not in ("nothing", "no rows", "no columns")
}  # fmt: skip
PATTERNS["plain"] = (7, 5, edges(7, 5, 20))


@cache
def dense(op, m, n, feat, dtype):
    rng = torch.Generator().manual_seed(3)
    sizes = {"m": m, "n": n, "feat": feat}
    record = OPERATORS[op]
    return [
        torch.rand(*(sizes[d] for d in record.axes(name)), dtype=dtype, generator=rng)
        for name in record.names
    ]


def want(op, edge_index, m, operands, values):
    source, target = edge_index.long()
    if op == "distances":
        x, y = operands
        return ((x[target] - y[source]) ** 2).sum(1)
    b, g = operands
    sums = torch.zeros(m, b.shape[1], dtype=b.dtype).index_add(
        0, target, values[:, None] * b[source]
    )
    return sums * torch.tanh(g)


def values_of(op, edge_index, dtype):
    if op == "distances":
        return None
    return torch.linspace(-1, 2, edge_index.shape[1], dtype=dtype)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("op", ["distances", "gated"])
def test_values_and_gradients(op, name):
    m, n, edge_index = PATTERNS[name]
    operands = [x.requires_grad_() for x in dense(op, m, n, 3, torch.float64)]
    values = values_of(op, edge_index, torch.float64)
    options = {} if values is None else {"values": values.requires_grad_()}
    leaves = [*operands, *options.values()]
    run = getattr(ops, op)
    result = run((edge_index, (n, m)), *operands, **options)
    right = want(op, edge_index, m, operands, values)
    torch.testing.assert_close(result, right)
    weights = torch.linspace(1, 2, result.numel(), dtype=torch.float64).reshape(result.shape)
    for a, b in zip(
        torch.autograd.grad((result * weights).sum(), leaves, create_graph=True),
        torch.autograd.grad((right * weights).sum(), leaves, create_graph=True), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b)
        if not a.numel():
            continue
        mine, theirs = (
            torch.autograd.grad(x.sin().sum(), leaves, allow_unused=True, retain_graph=True)
            for x in (a, b)
        )
        for p, q, leaf in zip(mine, theirs, leaves, strict=True):
            zero = torch.zeros_like(leaf)
            torch.testing.assert_close(zero if p is None else p, zero if q is None else q)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["distances", "gated"])
def test_compiled_by_torch(op):
    m, n, edge_index = PATTERNS["plain"]
    operands = [x.clone().requires_grad_() for x in dense(op, m, n, 4, torch.float32)]
    values = values_of(op, edge_index, torch.float32)
    options = {} if values is None else {"values": values}
    run = getattr(ops, op)

    def loss(*operands):
        return run((edge_index, (n, m)), *operands, **options).sin().sum()

    torch.compile(loss, fullgraph=True)(*operands).backward()
    plain = [x.detach().clone().requires_grad_() for x in operands]
    want(op, edge_index, m, plain, values).sin().sum().backward()
    for a, b in zip(operands, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_plans_and_searches():
    matrix = sp.random_array((40, 30), density=0.2, format="csr", dtype="float32", rng=0)
    x, y = (np.random.default_rng(0).random((s, 16), dtype="float32") for s in matrix.shape)
    rows, columns = matrix.nonzero()
    right = ((x[rows] - y[columns]) ** 2).sum(1)
    distances = sparsetir.plan("distances", matrix, 16)
    assert (distances.chosen_by, distances.config["distances.size"]) == ("default", 16)
    np.testing.assert_allclose(distances(x, y), right, rtol=1e-5)
    b, g = (np.random.default_rng(1).random((s, 16), dtype="float32") for s in (30, 40))
    space = sparsetir.plan_candidates("gated", matrix, 16)
    assert space == [Choices({"gated.size": 16, "threads": 1})]
    options = {"threads": 1, "sampler": "random", "records": ""}  # workers import the plug-in
    tuned = sparsetir.tune("gated", matrix, 16, trials=2, **options)
    assert tuned.counts.get("ok", 0) >= 2 and tuned.configs > 3
    for trial in tuned.trials:
        if trial.outcome.state == "ok":
            result = sparsetir.plan("gated", matrix, 16, config=trial.config)(b, g)
            np.testing.assert_allclose(result, (matrix @ b) * np.tanh(g), rtol=1e-4, atol=1e-5)


def test_values_that_no_tensor_holds_are_as_the_operands():
    matrix = sp.random_array((7, 5), density=0.5, format="csr", dtype="float64", rng=0)
    b, g = dense("gated", 7, 5, 3, torch.float32)
    right = torch.from_numpy(matrix.toarray()).float() @ b * torch.tanh(g)
    for A in (matrix, sparsetir.SparseMatrix(matrix)):
        torch.testing.assert_close(ops.gated(A, b, g), right)


def test_a_gradient_that_cannot_be_derived_is_refused_in_the_call():
    A, x, y = (edges(7, 7, 12), 7), torch.rand(7, 3, requires_grad=True), torch.rand(7)
    y.requires_grad_()
    for run in (ops.normed, torch.compile(ops.normed, backend="aot_eager")):
        with pytest.raises(Exception, match="normed: argument 'x': expected a tensor that needs "
                           "no gradient, .* got one that does .*reduces by product"):  # fmt: skip
            run(A, x, y)
    with torch.no_grad():
        right = (x**2).prod(1)[A[0][1]] * y[A[0][0]]
        torch.testing.assert_close(ops.normed(A, x, y).sum(), right.sum())


def test_an_operator_of_several_iterations_has_gradients():
    A = edges(7, 7, 12)
    x, y = (torch.rand(*shape, requires_grad=True) for shape in ((7, 3), (7,)))
    right = ((x**2).sum(1)[A[1]] * y[A[0]]).sum()
    exact = torch.autograd.grad(right, (x, y))
    torch.testing.assert_close(torch.autograd.grad(ops.scaled((A, 7), x, y).sum(), (x, y)), exact)


def test_refusals():
    x, A = torch.rand(7, 3), (edges(7, 7, 12), 7)
    refuse("""
        ops.distances(A, x)  # TypeError: distances: expected 2 operands (x, y), got 1
        ops.distances(A, x, x[:3])  # ValueError: argument 'y': expected shape (7, 3)
        ops.distances(A, x, x.double())  # TypeError: argument 'y': expected float32
        ops.distances(A, x, x[0])  # ValueError: argument 'y': expected 2 dimensions
        ops.distances(A, x, x, values=x)  # TypeError: the operator takes none
        ops.gated(A, x, x, values=x)  # ValueError: argument 'values'
        sparsetir.plan("distances", A[0], 4, heads=2)  # ValueError: argument 'heads'
        torch.ops.sparsetir.distances(*ops.resolve(A)[:2], 7, x[:3], x)
            # ValueError: argument 'x': expected shape (7, 3), got (3, 3)
        ops.no_such_operator  # AttributeError: no_such_operator
    """, globals(), locals())  # fmt: skip


def test_an_operator_without_features_is_asked_for_none():
    def program(problem):
        return with_names(PROGRAMS["spmv"].make(problem.dtype, problem.idtype), {"y": "out"})

    dims = {"x": "n", "out": "m"}
    register(
        Operator("damped", OfProgram, "a product", dims, True, None, ("sum",), program=program)
    )
    A = sparsetir.SparseMatrix(sp.random(9, 7, 0.3, "csr", np.float32, random_state=0))
    x = np.linspace(0, 1, 7, dtype="float32")
    for feat in (None, x, 1):
        run = sparsetir.plan("damped", A, feat)
        np.testing.assert_allclose(run(x), A.to_scipy() @ x, rtol=1e-5)
    with pytest.raises(ValueError, match="'feat': expected 1 for 'damped', got 3"):
        sparsetir.plan("damped", A, 3)
