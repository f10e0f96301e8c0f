"""Kernels of messages, edge values, softmax and attention: programs against the interpreter."""

import functools

import numpy as np
import pytest

import sparsetir
from cuda_runner import requires_cuda_text, run_cuda
from gpu_runner import OPENCL_TARGET as GPU
from gpu_runner import requires_opencl, run_opencl
from pairs import by_turns
from programs import copied
from sparsetir.schedules.operators import messages
from sparsetir.schedules.operators.edge_attention import EdgeAttention
from sparsetir.schedules.operators.edge_messages import EdgeMessages
from sparsetir.schedules.operators.edge_softmax import EdgeSoftmax
from sparsetir.schedules.operators.messages import Messages
from sparsetir.schedules.targets import resolve_target
from sparsetir.schedules.template import TEMPLATES, Choices
from sparsetir.schedules.templates.of_program import default_of
from sparsetir.sparse_ir.computed import computed_parameters

# Last tiles that begin earlier compute some results twice, and equal.
RUNNERS = [
    pytest.param(run_opencl, marks=requires_opencl, id="OpenCL"),
    pytest.param(functools.partial(run_cuda, equal=True), marks=requires_cuda_text, id="CUDA"),
]
M, N, HEADS = 6, 5, 2


def pattern(idtype="int32", seed=0):
    """Rows of 0 to 7 elements, some of them parallel, with columns in any order."""
    rng = np.random.default_rng(seed)
    lengths = np.array([3, 0, 7, 1, 0, 2])
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(idtype)
    indices = rng.integers(0, N, indptr[-1]).astype(idtype)
    return {"indptr": indptr, "indices": indices, "block_ptr": np.array([0, 2, 2, M], idtype)}


def features(rng, rows, dims, feat, dtype="float32"):
    shape = (rows, *([HEADS] if "h" in dims else []), *([feat] if "f" in dims else []))
    return rng.standard_normal(shape).astype(dtype)


def config_of(problem, arguments, target="llvm", least=0):
    """The default for these sizes, on one thread for less work than some."""
    sizes = {name: x for name, x in arguments.items() if isinstance(x, int)}
    return default_of(problem, sizes, resolve_target(target), 2, least)


def interpreted(program, arguments):
    arrays = copied(arguments)
    sparsetir.interpret(program, arrays)
    return arrays


def check(problem, arguments, outputs, expected=None):
    """The kernels on all threads and on one give what the interpreter gives for the program."""
    template = TEMPLATES[Choices, type(problem)]
    program = template.program(problem, None)
    computed = computed_parameters(program)
    taken = {p.name: arguments[p.name] for p in program.params if p.name not in computed}
    expected = expected or interpreted(program, taken)
    for least in (0, 1 << 30):
        config, arrays = config_of(problem, arguments, least=least), copied(taken)
        stages = sparsetir.lower(program, template.apply, config)
        assert ("T.parallel(" in stages["III"].script()) == (least == 0), config
        sparsetir.build(program, schedule=template.apply, config=config, check=False)(**arrays)
        for name in outputs:
            np.testing.assert_allclose(arrays[name], expected[name], atol=1e-5, rtol=1e-5)
            assert not np.isnan(arrays[name].astype("float64")).all()


def check_on_threads(problem, arguments, outputs, run, expected=None):
    """The kernel for GPUs, run on a CPU, gives what the interpreter gives."""
    template, config = TEMPLATES[Choices, type(problem)], config_of(problem, arguments, GPU)
    program = template.program(problem, config)
    stages = sparsetir.lower(program, template.apply, config, GPU)
    taken = {p.name: arguments[p.name] for p in program.params}
    expected = expected or interpreted(program, taken)
    last = stages["III"]
    names = dict(zip(taken, (p.name for p in last.params), strict=True))
    result = run(last, {names[k]: v for k, v in taken.items()})
    for name in outputs:
        np.testing.assert_allclose(result[names[name]], expected[name], atol=1e-5, rtol=1e-5)


def message_arguments(problem, feat, seed=1):
    rng = np.random.default_rng(seed)
    p = pattern(problem.idtype)
    nnz = len(p["indices"])
    return {
        **p, "feat": feat,
        "u": features(rng, N, problem.u, feat, problem.dtype),
        "e": features(rng, nnz, problem.e, feat, problem.dtype) + np.array(3, problem.dtype),
        "out": np.full((nnz if problem.backward else M, HEADS, feat), np.nan, problem.dtype),
        **{x: features(rng, M, "hf", feat, problem.dtype) for x in ("y", "g") if problem.backward},
        "arg_out": np.full((M, HEADS, feat), -7, problem.idtype),
        "order": rng.permutation(nnz).astype(problem.idtype),
        "m": M, "n": N, "nnz": nnz, "heads": HEADS,
    }  # fmt: skip


# Each dimension lacking once, in-order edges and others, both index types.
@pytest.mark.parametrize(
    ("problem", "feat"),
    [
        (Messages("mul", "sum", "hf", "h"), 7),
        (Messages("sub", "mean", "f", "hf", "float64", "int64", ordered=True), 3),
        (Messages("div", "max", "h", "f", ordered=True, arg=True), 2),
        (Messages("copy_e", "min", "", "hf", "float32", "int64"), 2),
        (Messages("copy_u", "min", "hf", "", ordered=True, arg=True), 17),
        (Messages("mul", "max", "f", "h", "float16", ordered=True, arg=True), 5),
        (Messages("add", "sum", "f", ""), 32),
        (Messages("mul", "logsumexp", "hf", "h", "float16"), 20),
        (Messages("sub", "logsumexp", "f", "hf", "float64", "int64", backward=True), 3),
    ],
)
@pytest.mark.default(2)
def test_messages(problem, feat):
    outputs = ["out", *(["arg_out"] if problem.arg else [])]
    check(problem, message_arguments(problem, feat), outputs)


def edge_arguments(problem, feat):
    rng, nnz = np.random.default_rng(2), 9
    lhs_rows, rhs_rows = (nnz if end == "edge" else N for end in (problem.lhs_at, problem.rhs_at))
    shape = (nnz, HEADS) if problem.op == "dot" else (nnz, HEADS, feat)
    return {
        "lhs": features(rng, lhs_rows, problem.lhs, feat, problem.dtype),
        "rhs": features(rng, rhs_rows, problem.rhs, feat, problem.dtype),
        "lhs_of": rng.integers(0, N, nnz).astype(problem.idtype),
        "rhs_of": rng.integers(0, N, nnz).astype(problem.idtype),
        "out": np.full(shape, np.nan, problem.dtype),
        "lhs_nodes": N, "rhs_nodes": N, "nnz": nnz, "heads": HEADS, "feat": feat,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "feat"),
    by_turns(
        [
            (EdgeMessages("add", "h", "hf"), 3),
            (EdgeMessages("div", "f", "h", "edge", "node", "float64", "int64"), 1),
            (EdgeMessages("dot", "hf", "f"), 6),
            (EdgeMessages("dot", "h", "hf", "node", "edge"), 3),
            (EdgeMessages("dot", "hf", "hf"), 37),
            (EdgeMessages("copy_rhs", "", "hf"), 40),
        ],
        2,
    ),
)
def test_edge_messages(problem, feat):
    check(problem, edge_arguments(problem, feat), ["out"])


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("op", ["add", "dot"])
def test_edge_messages_on_threads(op, run):
    problem = EdgeMessages(op, "hf", "f")
    check_on_threads(problem, edge_arguments(problem, 6), ["out"], run)


def softmax_arguments(problem, heads):
    p, rng, batch = pattern(problem.idtype), np.random.default_rng(3), 2
    nnz = len(p["indices"])
    x, g = (rng.standard_normal((batch * nnz, heads)).astype(problem.dtype) * 9 for _ in range(2))
    out = np.full_like(x, np.nan)
    arrays = {"x": x, "out": out, **({"g": g} if problem.backward else {})}
    return {**p, **arrays, "batch": batch, "m": M, "nnz": nnz, "heads": heads}


@pytest.mark.parametrize(
    ("problem", "heads"),
    by_turns(
        [
            (EdgeSoftmax(), 1),
            (EdgeSoftmax("float64", "int64"), 3),
            (EdgeSoftmax(), 40),
            (EdgeSoftmax(backward=True), 6),
        ],
        3,
    ),
)
@pytest.mark.default(1)
def test_softmax(problem, heads):
    check(problem, softmax_arguments(problem, heads), ["out"])


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize(("backward", "heads"), [(False, 7), (True, 7), (False, 1)])
def test_softmax_on_threads(backward, heads, run):
    problem = EdgeSoftmax(backward=backward)
    check_on_threads(problem, softmax_arguments(problem, heads), ["out"], run)


def attention_arguments(feat, width):
    p, rng = pattern(), np.random.default_rng(4)
    nnz = len(p["indices"])
    return {
        **p,
        "q": features(rng, M, "hf", feat), "k": features(rng, N, "hf", feat),
        "v": features(rng, N, "hf", width), "out": np.full((M, HEADS, width), np.nan, "float32"),
        "scores": np.zeros(HEADS * nnz, "float32"), "scale": 0.5, "m": M, "n": N, "nnz": nnz,
        "heads": HEADS, "feat": feat, "width": width,
    }  # fmt: skip


@pytest.mark.parametrize(("feat", "width"), by_turns([(5, 3), (1, 16), (40, 24)], 2))
@pytest.mark.default("5-3")
def test_attention(feat, width):
    check(EdgeAttention(), attention_arguments(feat, width), ["out"])


@pytest.mark.parametrize("run", RUNNERS)
def test_attention_on_threads(run):
    check_on_threads(EdgeAttention(), attention_arguments(6, 5), ["out"], run)


@pytest.mark.parametrize("run", [None, *RUNNERS])
def test_sums_of_16_bits(run):
    """Sums are rounded once: 2048 + 1 is 2048 in float16."""
    problem = Messages("copy_u", "sum", "hf", "", "float16")
    arguments = message_arguments(problem, 3)
    arguments["u"][:], lengths = 1, np.diff(arguments["indptr"])
    arguments["u"][arguments["indices"][3]] = 2048
    values = arguments["u"][arguments["indices"]].astype("float32")
    exact = np.add.reduceat(values, arguments["indptr"][:-1]) * (lengths > 0)[:, None, None]
    exact = exact.astype("float16")
    if run is not None:
        return check_on_threads(problem, arguments, ["out"], run, {"out": exact})
    return check(problem, arguments, ["out"], expected={"out": exact})


@pytest.mark.parametrize("run", RUNNERS)
def test_messages_with_places_on_threads(run):
    problem = Messages("mul", "max", "hf", "h", ordered=True, arg=True)
    arguments = message_arguments(problem, 6)
    empty = np.diff(arguments["indptr"]) == 0
    arguments["row"] = np.where(empty, 0, -np.inf).astype("float32")
    check_on_threads(problem, arguments, ["out", "arg_out"], run)


def test_rows_are_asked_for_once():
    """A maximum has its term several times."""
    apply, config = TEMPLATES[Choices, Messages].apply, Choices({"gspmm.size": 64})
    problems = [Messages("copy_u", reduce, "f", "") for reduce in ("sum", "max")]
    stages = [sparsetir.lower(messages.program(p), apply, config) for p in problems]
    one, other = (x["III"].script().count("llvm.prefetch") for x in stages)
    assert one == other > 0
