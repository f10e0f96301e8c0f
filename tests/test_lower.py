"""`sparsetir.lower`: all stages of what users, plans and operators compile."""

# pyright: reportAttributeAccessIssue=false

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
import tvm
from tvm import s_tir
from tvm.script import tirx as T

import sparsetir
from kernel_common import arguments, check
from programs import PROGRAMS
from sparsetir import ops
from sparsetir.formats import BSR
from sparsetir.formats.pattern import Pattern
from sparsetir.ops import message_kernels
from sparsetir.planning import compiled
from sparsetir.planning.matrix_request import matrix_request as request
from sparsetir.runtime.pipeline import lower_template
from sparsetir.runtime.targets import resolve_target
from sparsetir.schedules.gpu.rgms import RelationalRows
from sparsetir.schedules.gpu.rgms_gradients import GradientTiles
from sparsetir.schedules.gpu.rgms_tensor_cores import RelationalTensorCores
from sparsetir.schedules.gpu.sddmm import FusedNonzeros
from sparsetir.schedules.gpu.spmm import RowSplit
from sparsetir.schedules.gpu.spmm_groups import Groups
from sparsetir.schedules.gpu.spmm_hyb import HybRows
from sparsetir.schedules.gpu.spmm_panels import PanelThreads
from sparsetir.schedules.gpu.spmm_tensor_cores import TensorCores
from sparsetir.schedules.multiversion import multiversion
from sparsetir.schedules.operators.problems import Sddmm, Spmm
from sparsetir.schedules.operators.rgms import Rgms
from sparsetir.schedules.operators.rgms_gradients import RgmsGradient
from sparsetir.schedules.templates.amx import AmxBlocks
from sparsetir.schedules.templates.decomposed import Decomposed
from sparsetir.schedules.templates.registry import TEMPLATES, template_of
from sparsetir.schedules.templates.rgms import TiledRelations
from sparsetir.schedules.templates.sddmm import SddmmGroups
from sparsetir.schedules.templates.spmm import RowBlocks
from sparsetir.schedules.templates.spmm_blocks import BlockRows
from sparsetir.schedules.templates.spmm_panels import PanelRows
from sparsetir.schedules.templates.spmm_sorted import SortedRows
from sparsetir.schedules.templates.spmv import SlicedRows

STAGES = ["I", "II", "II scheduled", "III"]
GPU = resolve_target({"kind": "cuda", "arch": "sm_90"})
TILES = {"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu", "mcpu": "sapphirerapids"}
A = sparsetir.SparseMatrix(sp.random_array((24, 16), density=0.3, dtype="float32", rng=0))
# (operator, config, for GPUs)
KERNELS = [
    ("spmm", RowBlocks(tile=32, lanes=8), False),
    ("spmm", BlockRows(BSR(4, 4), tile=32, lanes=8, filled=False), False),
    ("spmm", PanelRows(2, 32, 8), False),
    ("spmm", SortedRows(32, 8), False),
    ("spmv", SlicedRows(), False),
    ("sddmm", SddmmGroups(lanes=8, vectors=4), False),
    ("spmm", Decomposed(BSR(2, 2)), False),
    ("spmm", Decomposed(BSR(2, 2), 32, 8), False),
    ("spmm", BlockRows(BSR(2, 2), rows=2, tile=32, filled=False), False),
    ("spmm", RowSplit.for_features(32), True),
    ("spmm", HybRows.for_features(32), True),
    ("spmm", PanelThreads.for_features(32, rows=2), True),
    ("spmm", Groups.for_features(32, lanes=8, group=8), True),
    ("spmm", Groups.for_features(32, split="non-zeros", work=4), True),
    ("spmm", Groups.for_features(32, split="non-zeros", group=32), True),
    ("spmm", Decomposed(BSR(2, 2)), True),
    ("spmm", TensorCores(BSR(16, 16), tile=32, warps=(1, 1)), True),
    ("sddmm", FusedNonzeros.for_features(32), True),
]


def spmm():
    return PROGRAMS["spmm"].make("float32", "int32")


@T.prim_func(s_tir=True)
def plain(x: T.Buffer((4,), "float32")):
    for i in range(4):
        with T.sblock("zero"):
            vi = T.axis.spatial(4, i)
            x[vi] = T.float32(0)


def text(stages):
    return {name: func.script() for name, func in stages.items()}


def features_first(sch, config=None):
    """Features before what a row stores, as TVM's own primitives could not."""
    spmm = sch.get_sparse_iteration("spmm")
    i, j, k = sch.get_sp_iters(spmm)
    sch.sparse_reorder(spmm, [i, k, j])
    if config is not None:
        sch.annotate(spmm, "tile", config["tile"])


def ordered(func):
    return "T.sp_iter([I, K, J], " in func.script()


# -- what is given, and what comes of it ------------------------------------------------------


def test_stages_of_a_stage_one_function():
    func, target = spmm(), resolve_target("llvm")
    stages = sparsetir.lower(func)
    assert list(stages) == STAGES and stages["I"] is func
    second = sparsetir.lower_sparse_iter(func)
    assert stages["II"].script() == second.script()
    scheduled = multiversion(func, target)["II scheduled"]
    assert stages["II scheduled"].script() == scheduled.script()
    assert text(stages) == text(sparsetir.build(func).stages)


@pytest.mark.parametrize("target", ["llvm", GPU], ids=["cpu", "gpu"])
def test_last_passes_are_in_stage_three(target):
    """`build` compiles it as it is: local buffers of CPUs on the stack, GPUs' where they were."""
    template, problem, config = (
        (TEMPLATES[RowBlocks, Spmm], request("spmm", A, 32).problem, RowBlocks(tile=32, lanes=8))
        if target == "llvm"
        else (TEMPLATES[RowSplit, Spmm], request("spmm", A, 32).problem, RowSplit.for_features(32))
    )
    found = text(lower_template(template, problem, config, target))
    assert '"local"' in found["II scheduled"]
    assert ('"local"' in found["III"]) == (target is GPU)


def test_a_function_of_stage_two_is_taken_as_it_is():
    second = sparsetir.lower_sparse_iter(spmm())
    sch = s_tir.Schedule(s_tir.renew_defs(second))
    for given, func in ((second, second), (sch, sch.mod["main"])):
        stages = sparsetir.lower(given)
        assert list(stages) == ["II scheduled", "III"]
        assert stages["II scheduled"].script() == func.script()
    assert list(sparsetir.lower(plain)) == ["III"]


def test_a_schedule_gives_its_function_as_it_is_now():
    sch = sparsetir.Schedule(spmm())
    features_first(sch)
    stages = sparsetir.lower(sch)
    assert list(stages) == STAGES and stages["I"] is sch.func and ordered(stages["I"])
    kernel = sparsetir.build(sch)
    assert kernel.name == "spmm" and text(kernel.stages) == text(stages)
    args = arguments()
    kernel(**args)
    check(args)


def test_a_schedule_that_went_on_to_stage_two_gets_no_default_schedule():
    sch = sparsetir.Schedule(spmm())
    features_first(sch)
    second = sch.lower()
    loop = second.get_loops(second.get_sblock("spmm0"))[0]
    second.annotate(loop, "mine", 1)
    stages = sparsetir.lower(sch)
    assert list(stages) == STAGES and ordered(stages["I"])
    assert "mine" in stages["II scheduled"].script() and "mine" not in stages["II"].script()
    assert "T.parallel" not in stages["II scheduled"].script()
    args = arguments()
    sparsetir.build(sch)(**args)
    check(args)


def test_a_schedule_for_build():
    func = spmm()
    kernel = sparsetir.build(func, schedule=features_first, config={"tile": 8})
    assert ordered(kernel.stages["I"]) and '"tile": 8' in kernel.stages["I"].script()
    assert "tile" not in sparsetir.build(func, schedule=features_first).stages["I"].script()
    assert not ordered(func)  # the function given is left as it is
    args = arguments()
    kernel(**args)
    check(args)


def test_a_schedule_for_a_module_of_one_function():
    kernel = sparsetir.build(tvm.IRModule({"product": spmm()}), schedule=features_first)
    assert kernel.name == "product" and ordered(kernel.stages["I"])


# -- plans and operators ----------------------------------------------------------------------


@pytest.mark.parametrize("op, config, gpu", KERNELS, ids=lambda x: type(x).__name__)
def test_every_stage_of_a_template(op, config, gpu):
    dtype = "float16" if isinstance(config, TensorCores) else None
    feat, target = 1 if op == "spmv" else 32, GPU if gpu else "llvm"
    wanted = request(op, A, feat, dtype=dtype, target=target)
    stages = wanted.stages(config)
    assert list(stages) == STAGES
    template = wanted.template(config)
    plain = template.program(wanted.problem, config.compiled)
    untouched = config == Decomposed(BSR(2, 2))
    assert (stages["I"].script() == plain.script()) == untouched
    found = text(stages)
    assert len(set(found.values())) == 4
    assert "T.sp_iter(" in found["I"] and "T.sp_iter(" not in found["II"]
    assert ("threadIdx" in found["III"]) == gpu
    if config in (RowBlocks(tile=32, lanes=8), SddmmGroups(lanes=8, vectors=4)):
        assert text(sparsetir.plan(op, A, wanted.feat, config=config).kernel.stages) == found


def test_every_stage_of_a_template_for_a_matrix_engine():
    wanted = request("spmm", A, 32, dtype="bfloat16", target=TILES)
    stages = wanted.stages(AmxBlocks(BSR(16, 16)))
    assert list(stages) == STAGES and len(set(text(stages).values())) == 4
    assert "llvm.x86.tdpbf16ps" in stages["III"].script()


def test_no_template_is_left_out():
    ours = {
        kind for kind, problem in TEMPLATES
        if kind.__module__.startswith("sparsetir.") and problem in (Spmm, Sddmm, Rgms, RgmsGradient)
    }  # fmt: skip
    apart = {AmxBlocks, GradientTiles, RelationalRows, RelationalTensorCores, TiledRelations}
    assert {type(config) for _, config, _ in KERNELS} | apart == ours


@pytest.mark.parametrize(
    "config",
    [TiledRelations(32, 32), RelationalRows(0), RelationalTensorCores(0), GradientTiles(0)],
    ids=repr,
)
def test_every_stage_of_a_template_for_relations(config):
    cores = isinstance(config, RelationalTensorCores)
    problem = Rgms("float16", out="float32") if cores else Rgms()
    if isinstance(config, GradientTiles):
        problem = RgmsGradient(weighted=False, edges=True)
    gpu = not isinstance(config, TiledRelations)
    template = template_of(config, problem, gpu)
    stages = lower_template(template, problem, config, GPU if gpu else "llvm")
    assert list(stages) == STAGES and len(set(text(stages).values())) == 4


def test_operators_for_torch_keep_every_stage(monkeypatch):
    monkeypatch.setattr(compiled, "_kernels", {})
    rowptr, col = torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1])
    x, e = torch.rand(3, 2, 4), torch.rand(3, 2)
    at = ops.structure_of(rowptr, col, 3)
    message_kernels.gspmm(at, x, None, "copy_u", "sum")
    message_kernels.gsddmm(at, x, torch.rand(2, 2, 4), "add", ("u", "v"))
    message_kernels.softmax(at, e[None])
    message_kernels.attention(at, torch.rand(2, 2, 4), x, x, 1.0)
    torch.ops.sparsetir.gspmm_arg(rowptr, col, x, None, 3, "copy_u", "max")
    names = {kernel.name for kernel in compiled._kernels.values()}
    assert {"edge_softmax", "edge_attention"} < names and len(names) >= 5
    for kernel in compiled._kernels.values():
        assert list(kernel.stages) == STAGES, kernel
        assert "T.sp_iter(" in kernel.stages["I"].script()


def test_a_template_of_primitives_alone():
    """A template is all that has a program and `apply(sch, config)`."""
    template = SimpleNamespace(program=lambda problem, config: spmm(), apply=features_first)
    stages = lower_template(template, None, {"tile": 8})
    assert list(stages) == STAGES and '"tile": 8' in stages["I"].script()
    both = sparsetir.lower(spmm(), features_first, {"tile": 8})
    assert text(stages) == text(both)


# -- conversions ------------------------------------------------------------------------------


def test_plans_take_the_conversions_that_a_matrix_keeps(monkeypatch):
    matrix = sparsetir.SparseMatrix(A.to_scipy())
    b = np.random.default_rng(0).standard_normal((16, 32)).astype("float32")
    first = sparsetir.plan("spmm", matrix, 32, config=Decomposed(BSR(2, 2)))
    (kept,) = matrix.cached.values()

    def refuse(*args, **kwargs):
        raise AssertionError("it is there already")

    monkeypatch.setattr(BSR, "convert", refuse)
    monkeypatch.setattr(Pattern, "from_csr", refuse)
    other = matrix.with_values(2 * matrix.values)
    second = sparsetir.plan("spmm", other, 32, config=Decomposed(BSR(2, 2)))
    assert list(matrix.cached.values()) == [kept]
    np.testing.assert_allclose(first(b), matrix.to_scipy() @ b, atol=1e-5)
    np.testing.assert_allclose(second(b), other.to_scipy() @ b, atol=1e-5)


def test_patterns_of_another_type_are_converted_for_themselves():
    pattern = request("spmm", A, 32).pattern
    assert pattern.coordinates is A.pattern
    wide = request("spmm", A, 2**31).pattern
    assert wide.indptr.dtype == wide.indices.dtype == np.int64
    assert wide.coordinates is not A.pattern and wide.coordinates.coords[0].dtype == np.int64


# -- refusals ---------------------------------------------------------------------------------


def test_function_of_another_type():
    message = (
        r"lower: argument 'func': expected a stage-I function, a PrimFunc, a Schedule or an "
        r"s_tir\.Schedule, got str$"
    )
    with pytest.raises(TypeError, match=message):
        sparsetir.lower("spmm")
    with pytest.raises(TypeError, match=r"lower: argument 'func': .*, got IRModule$"):
        sparsetir.lower(tvm.IRModule({"f": spmm()}))


@pytest.mark.parametrize("make", [sparsetir.lower_sparse_iter, sparsetir.Schedule])
def test_schedule_beside_what_is_scheduled(make):
    given = make(spmm())
    message = (
        r"lower: argument 'schedule': expected None beside a function that is scheduled, got one "
        rf"beside a {type(given).__name__}; give the stage-I function"
    )
    for call in (sparsetir.lower, lambda f, s: sparsetir.build(f, schedule=s)):
        with pytest.raises(ValueError, match=message):
            call(given, features_first)


def test_schedule_that_is_none():
    message = r"lower: argument 'schedule': expected a function \(sch, config\) or None, got dict"
    with pytest.raises(TypeError, match=message):
        sparsetir.lower(spmm(), {"tile": 8})


def test_config_without_a_schedule():
    message = r"lower: argument 'config': expected None without a schedule, which it is for, got 3"
    with pytest.raises(ValueError, match=message):
        sparsetir.lower(spmm(), config=3)
    with pytest.raises(ValueError, match=message):
        sparsetir.build(spmm(), config=3)


def test_schedule_for_several_functions():
    both = tvm.IRModule({"one": spmm(), "two": spmm()})
    message = (
        r"build: argument 'schedule': expected None beside a module of several functions "
        r"\(one, two\)"
    )
    with pytest.raises(ValueError, match=message):
        sparsetir.build(both, schedule=features_first)
    second = tvm.IRModule({"one": plain, "two": plain})
    message = r"lower: argument 'func': expected a schedule of one function, got one of 2"
    with pytest.raises(ValueError, match=message):
        sparsetir.lower(s_tir.Schedule(second))


def test_target_that_there_is_not():
    with pytest.raises(ValueError, match=r"argument 'target': .*nonsense"):
        sparsetir.lower(spmm(), target="nonsense")
