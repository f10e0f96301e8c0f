"""`sparsetir.lower`: all stages of what users, plans and operators compile."""

# pyright: reportAttributeAccessIssue=false

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from tvm import s_tir
from tvm.script import tirx as T

import sparsetir
from kernel_common import arguments, check
from programs import PROGRAMS
from refusals import refusals, refuse
from small import small
from sparsetir.formats import BSR
from sparsetir.formats.pattern import Pattern
from sparsetir.planning.plan import requested as request
from sparsetir.runtime.pipeline import kernel_of, lower_template
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.targets import resolve_target
from sparsetir.schedules.template import Choices
from sparsetir.schedules.templates.decomposed import Decomposed
from sparsetir.schedules.templates.registry import TEMPLATES
from sparsetir.schedules.templates.row_tile import RowTile

STAGES = ["I", "II", "II scheduled", "III"]
GPU = resolve_target({"kind": "cuda", "arch": "sm_90"})


def spmm():
    return PROGRAMS["spmm"].make("float32", "int32")


A = sparsetir.SparseMatrix(sp.random_array((24, 16), density=0.3, dtype="float32", rng=0))


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


def test_sums_of_cpus_are_in_registers():
    """Not in TVM's workspaces, as those of scope "local", or of 1024 bytes and more, would be."""
    problem = request("spmm", A, 256).problem
    for config in (RowTile(tile=32, lanes=8), RowTile(tile=256, lanes=16)):
        stages = lower_template(TEMPLATES[RowTile, Spmm], problem, config, "llvm")
        assert '"local"' in text(stages)["III"]
        assert "AllocWorkspace" not in kernel_of(stages, resolve_target("llvm")).source()


def test_a_function_of_stage_two_is_taken_as_it_is():
    second = sparsetir.lower_sparse_iter(spmm())
    sch = s_tir.Schedule(s_tir.renew_defs(second))
    for source, func in ((second, second), (sch, sch.mod["main"])):
        stages = sparsetir.lower(source)
        assert list(stages) == ["II scheduled", "III"]
        assert stages["II scheduled"].script() == func.script()
    assert list(sparsetir.lower(plain)) == ["III"]


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


@pytest.mark.parametrize(
    ("op", "config"),
    [("spmm", RowTile(tile=32, lanes=8)), ("sddmm", Choices({"sddmm.parts": 1, "sddmm.size": 32}))],
    ids=["spmm", "sddmm"],
)
def test_a_plan_has_every_stage(op, config):
    stages = request(op, A, 32).stages(config)
    stages_text = text(stages)
    assert list(stages) == STAGES and len(set(stages_text.values())) == 4
    assert text(sparsetir.plan(op, A, 32, config=config).kernel.stages) == stages_text


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

SECOND = sparsetir.lower_sparse_iter(spmm())
BOTH = tvm.IRModule({"one": spmm(), "two": spmm()})
test_refusals = refusals(
    """
sparsetir.lower("spmm")  # TypeError: 'func': expected a stage-I function, a PrimFunc, a .. got str
sparsetir.lower(BOTH)  # TypeError: lower: argument 'func': .. , got IRModule
sparsetir.lower(SECOND, features_first)  # ValueError: 'schedule': expected None for a function
sparsetir.build(sparsetir.Schedule(spmm()), schedule=features_first)
    # ValueError: lower: argument 'schedule': expected None for .. got one with a Schedule
sparsetir.lower(spmm(), {"tile": 8})  # TypeError: 'schedule': expected a function (sch .. got dict
sparsetir.lower(spmm(), config=3)  # ValueError: 'config': expected None without a schedule .. got 3
sparsetir.build(spmm(), config=3)  # ValueError: argument 'config': expected None without a schedule
sparsetir.build(BOTH, schedule=features_first)  # ValueError: 'schedule': expected None for a
sparsetir.lower(s_tir.Schedule(tvm.IRModule({"one": plain, "two": plain})))
    # ValueError: lower: argument 'func': expected a schedule of one function, got one of 2
sparsetir.lower(spmm(), target="nonsense")  # ValueError: argument 'target': .. nonsense
""",
    globals(),
)


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_a_changed_layout_of_a_parameter_is_refused(name: str) -> None:
    body = """with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[i, j] * B[j, k]"""
    rows = "J = T.sparse_fixed(I, (8, 4), indices)\nN = T.dense_fixed(8)\nK = T.dense_fixed(32)"
    func = small("f", body, rows, A="I J", B="N K", C="I K")
    sch = tvm.s_tir.Schedule(sparsetir.lower_sparse_iter(func))
    sch.transform_layout(sch.get_sblock("spmm0"), name, lambda i, k: (k, i))
    words = f"argument '{name.lower()}': expected buffer '{name}' as ( .. ) float32, got ("
    refuse(f"sparsetir.build(sch)  # ScheduleError: lower: 'f': {words}", locals())
