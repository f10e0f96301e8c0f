"""The init of a reduction moves in front of its outermost reduction loop."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportMissingModuleSource=false

import pytest
from tvm import s_tir, tirx

from gpu_runner import requires_opencl
from programs import PROGRAMS
from sparsetir import LoweringError
from sparsetir.sparse_ir.hoist_init import hoist_init
from sparsetir.sparse_ir.nodes import walk
from stage2 import check, golden, loops, only, plain_text, run_cpu, run_gpu, schedule


def hoisted(program, steps=lambda sch: None):
    """A scheduled program, and the same with its inits in their places."""
    sch = schedule(PROGRAMS[program].make("float32", "int32"), steps)
    return sch, hoist_init(only(sch))


def blocks(func):
    """The realize of each block, by name."""
    found = {}

    def visit(node):
        if isinstance(node, s_tir.SBlockRealize):
            found[str(node.block.name_hint)] = node

    walk(func.body, visit)
    return found


def path_to(func, name):
    """Loop variables (as text) around a block, outermost first; None if there is no such block."""

    def search(node, path):
        if isinstance(node, tirx.For):
            return search(node.body, [*path, str(node.loop_var)])
        if isinstance(node, tirx.SeqStmt):
            found = [search(s, path) for s in node.seq]
            return next((f for f in found if f is not None), None)
        if isinstance(node, s_tir.SBlockRealize):
            if node.block.name_hint == name:
                return path
            return search(node.block.body, path)
        return None

    return search(func.body, [])


def test_golden():
    _, func = hoisted("spmm")
    assert plain_text(func) == golden("spmm_stage2_hoisted")


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_init_is_left_without_threads(program):
    _, func = hoisted(program)
    assert all(realize.block.init is None for realize in blocks(func).values())


def test_spatial_loops_around_the_reduction_stay_around_the_init():
    def steps(sch):
        j, k = loops(sch, "spmm1")
        sch.reorder(k, j)

    _, func = hoisted("spmm", steps)
    assert path_to(func, "spmm1_init") == ["i", "k"]
    assert path_to(func, "spmm1") == ["i", "k", "j"]


def test_spatial_loops_inside_the_reduction_are_repeated():
    def steps(sch):
        j, k = loops(sch, "spmm1")
        k0, k1 = sch.split(k, [None, 4])
        sch.reorder(k0, j, k1)
        sch.vectorize(k1)

    _, func = hoisted("spmm", steps)
    assert path_to(func, "spmm1_init") == ["i", "k_0", "k_1"]
    kinds = []
    walk(func.body, lambda n: kinds.append(n.kind) if isinstance(n, tirx.For) else None)
    assert kinds.count(tirx.ForKind.VECTORIZED) == 2


def test_predicate_of_a_spatial_split_stays():
    def steps(sch):
        j, k = loops(sch, "spmm1")
        sch.split(k, [None, 4])
        sch.split(j, [None, 3])

    sch, func = hoisted("spmm", steps)
    init, update = (blocks(func)[name] for name in ("spmm1_init", "spmm1"))
    assert str(init.predicate) == "k_0 * 4 + k_1 < feat"
    assert "j_0 * 3 + j_1 <" in str(update.predicate)
    check("spmm", sch, run_cpu)


def test_fused_spatial_and_reduction_loop():
    """The init gets a loop of its own over the spatial domain."""

    def steps(sch):
        jo, ii, ji, k = loops(sch, "spmm1")
        sch.split(sch.fuse(ii, ji), [None, 5])

    sch, func = hoisted("spmm_bsr", steps)
    assert path_to(func, "spmm1_init") == ["io", "ii", "k"]
    assert path_to(func, "spmm1") == ["io", "jo", "ii_ji_fused_0", "ii_ji_fused_1", "k"]
    check("spmm_bsr", sch, run_cpu)


def reduction_over_threads(sch):
    sch.bind(*loops(sch, "spmm0"), "blockIdx.x")
    j, k = loops(sch, "spmm1")
    sch.reorder(k, j)
    sch.bind(sch.split(j, [None, 8])[1], "threadIdx.x")


@requires_opencl
def test_reduction_over_threads_keeps_its_init():
    """TVM lowers it apart from the loop, and needs it to know what the threads combine."""
    sch, func = hoisted("spmm", reduction_over_threads)
    assert blocks(func)["spmm1"].block.init is not None
    assert "spmm1_init" not in blocks(func)
    check("spmm", sch, run_gpu)


@requires_opencl
def test_threads_outside_the_reduction():
    """Threads that only spatial loops are bound to hold the init, too."""

    def steps(sch):
        sch.bind(*loops(sch, "spmm0"), "blockIdx.x")
        j, k = loops(sch, "spmm1")
        k0, k1 = sch.split(k, [None, 4])
        sch.reorder(k0, j, k1)
        sch.bind(k1, "threadIdx.x")

    sch, func = hoisted("spmm", steps)
    assert path_to(func, "spmm1_init") == ["i", "k_0", "k_1"]
    check("spmm", sch, run_gpu)


def test_a_race_is_refused():
    def steps(sch):
        reduction_over_threads(sch)
        block = sch.get_sblock("spmm1")
        sch.decompose_reduction(block, sch.get_loops(block)[1])

    sch = schedule(PROGRAMS["spmm"].make("float32", "int32"), steps)
    with pytest.raises(
        LoweringError, match="'spmm1_update': its reduction is bound to threadIdx.x"
    ):
        hoist_init(only(sch))
