"""Kernels of messages, edge values, softmax and attention: programs against the interpreter."""

import functools
from dataclasses import replace

import numpy as np
import pytest

import sparsetir
from cuda_runner import requires_cuda_text, run_cuda
from gpu_runner import OPENCL_TARGET, requires_opencl, run_opencl
from programs import copied
from sparsetir.schedules.operators.edge_messages import EdgeMessages
from sparsetir.schedules.template import TEMPLATES, Choices
from sparsetir.schedules.templates import edge_attention, edge_messages, edge_softmax, messages
from sparsetir.schedules.templates.message_tiles import Tile
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


def check(template, problem, config, arguments, outputs, atol=1e-5):
    """The scheduled kernel gives what the interpreter gives for the program."""
    program = template.program(problem, config)
    computed = computed_parameters(program)
    taken = {p.name: arguments[p.name] for p in program.params if p.name not in computed}
    expected, found = (copied(taken) for _ in range(2))
    sparsetir.interpret(program, expected)
    if hasattr(template, "apply"):
        sparsetir.build(program, schedule=template.apply, config=config, check=False)(**found)
    else:
        scheduled = template.schedule(sparsetir.lower_sparse_iter(program), problem, config)
        sparsetir.build(scheduled, check=False)(**found)
    for name in outputs:
        np.testing.assert_allclose(found[name], expected[name], atol=atol, rtol=1e-5)
        assert not np.isnan(found[name].astype("float64")).all()


def check_on_threads(template, problem, config, arguments, outputs, run):
    """The kernel for GPUs, run on a CPU, gives what the interpreter gives."""
    program = template.program(problem, config)
    stages = sparsetir.lower(program, template.apply, config, OPENCL_TARGET)
    taken = {p.name: arguments[p.name] for p in program.params}
    expected = copied(taken)
    sparsetir.interpret(program, expected)
    last = stages["III"]
    names = dict(zip(taken, (p.name for p in last.params), strict=True))
    found = run(last, {names[k]: v for k, v in taken.items()})
    for name in outputs:
        np.testing.assert_allclose(found[names[name]], expected[name], atol=1e-5, rtol=1e-5)


def message_arguments(problem, feat, seed=1):
    rng = np.random.default_rng(seed)
    p = pattern(problem.idtype)
    nnz = len(p["indices"])
    return {
        **p, "feat": feat,
        "u": features(rng, N, problem.u, feat, problem.dtype),
        "e": features(rng, nnz, problem.e, feat, problem.dtype) + np.array(3, problem.dtype),
        "out": np.full((M, HEADS, feat), np.nan, problem.dtype),
        "arg_out": np.full((M, HEADS, feat), -7, problem.idtype),
        "order": rng.permutation(nnz).astype(problem.idtype),
        "m": M, "n": N, "nnz": nnz, "heads": HEADS,
    }  # fmt: skip


# Each dimension lacking once, a tile that overlaps, in-order edges and others, both index types.
@pytest.mark.parametrize(
    ("problem", "tile", "feat"),
    [
        (messages.Messages("mul", "sum", "hf", "h"), 4, 7),
        (messages.Messages("sub", "mean", "f", "hf", "float64", "int64", ordered=True), 2, 3),
        (messages.Messages("div", "max", "h", "f", ordered=True, arg=True), 1, 2),
        (messages.Messages("copy_e", "min", "", "hf", "float32", "int64"), 2, 2),
        (messages.Messages("copy_u", "min", "hf", "", ordered=True, arg=True), 16, 17),
        (messages.Messages("mul", "max", "f", "h", "float16", ordered=True, arg=True), 4, 5),
        (messages.Messages("add", "sum", "f", ""), 32, 32),
    ],
)
def test_messages(problem, tile, feat):
    config = Tile(tile, parallel=tile > 4)
    outputs = ["out", *(["arg_out"] if problem.arg else [])]
    check(messages, problem, config, message_arguments(problem, feat), outputs)


@pytest.mark.parametrize("tile", [1, 4])
def test_whose_given_results_are(tile):
    """What finds the results on the way says the same."""
    problem = messages.Messages("mul", "max", "hf", "", ordered=True, arg=True)
    arguments = message_arguments(problem, 6)
    program = messages.program(problem)
    sparsetir.interpret(program, {k.name: arguments[k.name] for k in program.params[:-1]})
    expected = arguments["arg_out"].copy()
    arguments["arg_out"][:] = -7
    problem = replace(problem, given=True)
    check(messages, problem, Tile(tile), arguments, ["arg_out", "out"])
    program = messages.program(problem)
    sparsetir.interpret(program, {k.name: arguments[k.name] for k in program.params})
    np.testing.assert_array_equal(arguments["arg_out"], expected)


def edge_arguments(problem, feat):
    rng, nnz = np.random.default_rng(2), 9
    lhs_rows, rhs_rows = (nnz if at == "edge" else N for at in (problem.lhs_at, problem.rhs_at))
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
    [
        (EdgeMessages("add", "h", "hf"), 3),
        (EdgeMessages("div", "f", "h", "edge", "node", "float64", "int64"), 1),
        (EdgeMessages("dot", "hf", "f"), 6),
        (EdgeMessages("dot", "h", "hf", "node", "edge"), 3),
        (EdgeMessages("dot", "hf", "hf"), 37),
        (EdgeMessages("copy_rhs", "", "hf"), 40),
    ],
)
def test_edge_messages(problem, feat):
    config, template = Choices({"gsddmm.size": feat}), TEMPLATES[Choices, EdgeMessages]
    check(template, problem, config, edge_arguments(problem, feat), ["out"])


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("op", ["add", "dot"])
def test_edge_messages_on_threads(op, run):
    problem, config = EdgeMessages(op, "hf", "f"), Tile(4, gpu=True)
    check_on_threads(edge_messages, problem, config, edge_arguments(problem, 6), ["out"], run)


def softmax_arguments(problem, heads):
    p, rng, batch = pattern(problem.idtype), np.random.default_rng(3), 2
    nnz = len(p["indices"])
    x, g = (rng.standard_normal((batch * nnz, heads)).astype(problem.dtype) * 9 for _ in range(2))
    out = np.full_like(x, np.nan)
    arrays = {"x": x, "out": out, **({"g": g} if problem.backward else {})}
    return {**p, **arrays, "batch": batch, "m": M, "nnz": nnz, "heads": heads}


# Heads of one tile, and of tiles that begin earlier, which must not divide what is divided again.
@pytest.mark.parametrize(
    ("problem", "tile", "heads"),
    [
        (edge_softmax.EdgeSoftmax(), 1, 1),
        (edge_softmax.EdgeSoftmax("float64", "int64"), 2, 3),
        (edge_softmax.EdgeSoftmax(), 32, 40),
        (edge_softmax.EdgeSoftmax(backward=True), 4, 6),
    ],
)
def test_softmax(problem, tile, heads):
    arguments, outputs = softmax_arguments(problem, heads), ["out"]
    for config in (Tile(tile, parallel=True), Tile(tile)):
        check(edge_softmax, problem, config, arguments, outputs)


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("backward", [False, True])
def test_softmax_on_threads(backward, run):
    problem = edge_softmax.EdgeSoftmax(backward=backward)
    arguments, outputs = softmax_arguments(problem, 7), ["out"]
    check_on_threads(edge_softmax, problem, Tile(4, gpu=True), arguments, outputs, run)


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


@pytest.mark.parametrize(
    ("feat", "width", "tiles"), [(5, 3, (4, 2)), (1, 16, (1, 16)), (40, 24, (32, 16))]
)
def test_attention(feat, width, tiles):
    problem, arguments = edge_attention.EdgeAttention(), attention_arguments(feat, width)
    for parallel in (False, True):
        config = edge_attention.AttentionTiles(Tile(tiles[0], parallel=parallel), Tile(tiles[1]))
        check(edge_attention, problem, config, arguments, ["out"])


@pytest.mark.parametrize("run", RUNNERS)
def test_attention_on_threads(run):
    tile, problem = Tile(4, gpu=True), edge_attention.EdgeAttention()
    config = edge_attention.AttentionTiles(tile, tile)
    check_on_threads(edge_attention, problem, config, attention_arguments(6, 5), ["out"], run)


@pytest.mark.parametrize("run", RUNNERS)
def test_messages_with_places_on_threads(run):
    problem = messages.Messages("mul", "max", "hf", "h", ordered=True, arg=True)
    arguments = message_arguments(problem, 6)
    empty = np.diff(arguments["indptr"]) == 0
    arguments["row"] = np.where(empty, 0, -np.inf).astype("float32")
    outputs = ["out", "arg_out"]
    check_on_threads(messages, problem, Tile(4, gpu=True), arguments, outputs, run)
