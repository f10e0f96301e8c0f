"""The passes behind tensor cores and fused relational products: what they make and refuse."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import s_tir, tirx
from tvm.script import tirx as T

from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from schedule_common import says, table
from sparsetir import Schedule
from sparsetir.formats import BSR, SRBCRS, Operand
from sparsetir.formats.decompose import decompose_format
from sparsetir.formats.preprocess import extract_preprocess
from sparsetir.schedules.gpu.passes.atomic_products import matmul_then_dot, sum_then_matmul
from sparsetir.schedules.gpu.passes.cooperative_copy import cooperative_copy
from sparsetir.schedules.gpu.passes.cooperative_sums import cooperative_dot, cooperative_gather
from sparsetir.schedules.gpu.passes.on_tensor_cores import Warps, on_tensor_cores
from sparsetir.schedules.gpu.passes.shared_tiles import shared_tiles
from sparsetir.schedules.gpu.passes.software_pipeline import software_pipeline
from sparsetir.schedules.gpu.passes.thread_tiled_matmul import thread_tiled_matmul
from sparsetir.schedules.gpu.passes.tile_products import sums_by_thread
from sparsetir.schedules.gpu.spmm_tensor_cores import TensorCores
from sparsetir.schedules.passes.shared_addresses import CONVERT, shared_addresses
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.tir import dtype_of
from stage2 import golden, plain_text
from tensor_cores_common import check, kernel, pattern, spmm

REST, START, WRITE = "spmm_reduce_rest0", "spmm_start0", "spmm_write0"
STEPS = [START, WRITE]


def tiles(block=16, out="float32", scope="shared"):
    """Stage II of a product of blocks by 16 features, with tiles of both factors."""
    rules = BSR(block, block).rules(Operand({"A": "float16"}, ("I", "J"), "int32"))
    unmasked = [rule.name for rule in rules]
    _, func = extract_preprocess(decompose_format(spmm("float16", out), rules, unmasked))
    sch = Schedule(func)
    it = sch.get_sparse_iteration(f"spmm_bsr_{block}_{block}")
    io, jo, ii, ji, k = sch.get_sp_iters(it)
    tile, k = sch.split(k, [None, 16])
    sch.sparse_reorder(it, [tile, io, jo, ii, k, ji])
    _, reduce, _ = sch.precompute("C", io, [ii, k])
    jo, ii, k, ji = sch.get_sp_iters(reduce)
    sch.precompute("B", jo, [ji, k], scope=scope, name="B_ws")
    sch.precompute(f"A_bsr_{block}_{block}", jo, [ii, ji], scope=scope, name="A_ws")
    return renamed(sch, f"_bsr_{block}_{block}")


def renamed(sch, suffix):
    """Stage II, without a format's name in those of blocks."""
    from sparsetir.sparse_ir.tir import block_with
    from sparsetir.sparse_ir.traversal import map_expr

    sch.lower()
    (func,) = sch.stage_two.mod.functions.values()

    def block(node):
        return block_with(node, name_hint=str(node.name_hint).replace(suffix, ""))

    return func.with_body(map_expr(func.body, [(s_tir.SBlock, block)]))


def maxima(func):
    """The same, with the largest products in place of their sums."""
    from sparsetir.sparse_ir.traversal import map_expr

    def changed(e):
        return tirx.Max(e.a, e.b) if dtype_of(e) == "float32" else e

    return func.with_body(map_expr(func.body, [(tirx.Add, changed)]))


def copied(func):
    for name in ("A_ws_copy0", "B_ws_copy0"):
        func = cooperative_copy(func, name, warps=1, vector=8)
    return func


def test_golden():
    """All three, one after the other."""
    func = on_tensor_cores(copied(tiles()), REST, STEPS, warps=(1, 1))
    func = software_pipeline(func, "spmm_reduce0", ["A_ws_copy0", "B_ws_copy0"], stages=2)
    assert plain_text(func) == golden("tensor_cores")


@T.prim_func(s_tir=True)
def transposed(A: T.Buffer((16, 8), "float16")):
    with T.sblock("visit"):
        S = T.sblock_alloc_buffer((8, 16), "float16", scope="shared")
        for i, j in T.grid(8, 16):
            with T.sblock("copy"):
                S[i, j] = A[j, i]


REFUSED = """
cooperative_copy(tiles(), "none", warps=1, vector=8)
    cooperative_copy: expected a block in loops, among [
on_tensor_cores(tiles(), "none", STEPS, warps=(1, 1))  # got 'none'
cooperative_copy(tiles(), START, warps=1, vector=8)
    argument 'copy': expected a block that copies to shared memory
cooperative_copy(tiles(), "B_ws_copy0", warps=1, vector=3)
    argument 'vector': expected a divisor of the 16 neighbours
cooperative_copy(tiles(scope="global"), "B_ws_copy0", warps=1, vector=8)
    argument 'copy': expected a block that copies to shared memory
cooperative_copy(transposed, "copy", warps=1, vector=8)
    argument 'vector': expected a divisor of the 16 neighbours
on_tensor_cores(tiles(scope="global"), REST, STEPS, warps=(1, 1))
    argument 'reduce': expected X[..] = X[..] + A[..] * B[..] of A and B in shared
on_tensor_cores(tiles(), START, STEPS, warps=(1, 1))
    argument 'reduce': expected X[..] = X[..] + A[..] * B[..] of A and B in shared
on_tensor_cores(maxima(tiles()), REST, STEPS, warps=(1, 1))
    argument 'reduce': expected X[..] = X[..] + A[..] * B[..] of A and B in shared
on_tensor_cores(tiles(out="float16"), REST, STEPS, warps=(1, 1))
    expected factors and sums of float16 and float32, bfloat16 and float32, int8
on_tensor_cores(tiles(), REST, STEPS, warps=(2, 2))
    expected rows and columns of a warp that 16 and 8 divide, and terms that 8
on_tensor_cores(tiles(block=4), REST, STEPS, warps=(1, 1))
    expected rows and columns of a warp that 16 and 8 divide, and terms that 8
on_tensor_cores(tiles(), REST, STEPS, warps=(3, 1))
    expected rows and columns of a warp that 16 and 8 divide, and terms that 8
on_tensor_cores(tiles(), REST, [START], warps=(1, 1))
    argument 'steps': expected the blocks of all accesses of the sums, got C_ws
on_tensor_cores(tiles(), REST, [START, WRITE, "A_ws_copy0"], warps=(1, 1))
    argument 'steps': expected loops over rows and columns of the sums
software_pipeline(copied(tiles()), "spmm_reduce0", ["A_ws_copy0"], stages=0)
    software_pipeline: argument 'stages': expected at least 1, got 0
software_pipeline(copied(tiles()), "spmm_reduce0", ["A_ws_copy0", START], stages=2)
    argument 'copies': expected blocks in block 'spmm_reduce0', among ['A_ws_copy0',
software_pipeline(copied(tiles()), "spmm_reduce0", ["A_ws_copy0", "B_ws_copy0"], stages=100)
    bytes each to fit in 49152 bytes of shared memory, got 100
shared_tiles(gathered(), "spmm_reduce0", ["D"], outer=1)
    argument 'operands': expected 'D' to be read at one place in block
shared_tiles(gathered(), "spmm_reduce0", ["B"], outer=3)
    argument 'operands': expected one of the loops inside to go along the last axis
"""


@pytest.mark.parametrize(("_", "code", "words"), table(REFUSED))
def test_refused(_, code, words):
    says(code, words, globals(), ScheduleError)


def gathered():
    rules = SRBCRS(8, 16).rules(Operand({"A": "float16"}, ("I", "J"), "int32"))
    unmasked = [rule.name for rule in rules if rule.masked]
    _, func = extract_preprocess(decompose_format(spmm("float16", "float32"), rules, unmasked))
    sch = Schedule(func)
    it = sch.get_sparse_iteration("spmm_sr_bcrs_8_16")
    io, g, j, ii, k = sch.get_sp_iters(it)
    tile, k = sch.split(k, [None, 16])
    sch.sparse_reorder(it, [tile, io, g, ii, k, j])
    sch.precompute("C", io, [ii, k])
    return renamed(sch, "_sr_bcrs_8_16")


def test_tiles_of_what_is_gathered():
    func = gathered()
    text = shared_tiles(func, "spmm_reduce0", ["A_sr_bcrs_8_16", "B"], outer=1).script()
    assert 'T.sblock("spmm_reduce0_visit")' in text and 'T.sblock("B_copy0")' in text


def by_hand(sch):
    """A user's product over blocks of 32 by 32, tensorized by TVM's primitive."""
    it = sch.get_sparse_iteration("spmm_bsr_32_32")
    io, jo, ii, ji, k = sch.get_sp_iters(it)
    sch.bound(k, 8, "multiple")
    tile, k = sch.split(k, [None, 128])
    sch.sparse_reorder(it, [tile, io, jo, ii, k, ji])
    start, reduce, write = sch.precompute("C", io, [ii, k])
    jo, ii, k, ji = sch.get_sp_iters(reduce)
    copies = sch.precompute("B", jo, [ji, k], scope="shared")
    copies += sch.precompute("A_bsr_32_32", jo, [ii, ji], scope="shared")
    sch.parallelize(tile, "block")
    sch.parallelize(io, "block")
    cores, loops = Warps(32, 128, (1, 4)), sch.lower()
    product = loops.get_sblock(f"{reduce.name}_rest0")
    loops.tensorize(loops.get_loops(product)[-3], cores.intrinsic("float16", terms=32))
    sch.rewrite(sums_by_thread, [f"{start.name}0", f"{write.name}0"], cores)
    for copy in copies:
        sch.rewrite(cooperative_copy, f"{copy.name}0", warps=4, vector=8)
    sch.rewrite(software_pipeline, f"{reduce.name}0", [f"{c.name}0" for c in copies], stages=3)


@requires_cuda_text
def test_a_product_of_a_user_by_tensorize():
    """The kernel runs, with as many instructions as the template's."""
    config = TensorCores(BSR(32, 32))
    template = kernel(config)
    rules = BSR(32, 32).rules(Operand({"A": "float16"}, ("I", "J"), "int32"))
    func = decompose_format(spmm("float16", "float32"), rules, [rule.name for rule in rules])
    run = CudaStages(extract_preprocess(func)[1], by_hand, arch="sm_80")
    check(template._replace(run=run), pattern(config.format, (150, 200), [0, 1, 2, 5]), feat=72)
    for instruction in ("mma_sync", "ldmatrix_sync", "cp_async"):
        assert (
            run.function.source.count(instruction)
            == template.run.function.source.count(instruction)
            > 0
        )


SUM_STEPS = ["sums_start", "sums_write"]


@T.prim_func(s_tir=True)
def products(
    I: T.Buffer((3, 16), "int32"), J: T.Buffer((3, 16, 2), "int32"),
    A: T.Buffer((3, 16, 2), "float32"), X: T.Buffer((9, 8), "float32"),
    W: T.Buffer((3, 8, 32), "float32"), Y: T.Buffer((20, 32), "float32"),
) -> None:  # fmt: skip
    """Rows in three tiles, two elements of each, 8 features in two steps."""
    for t in T.thread_binding(3, thread="blockIdx.x"):
        for i, l, k0, k1, j in T.grid(16, 32, 2, 4, 2):
            with T.sblock("sums"):
                vt, vi, vl, vk0, vk1, vj = T.axis.remap("SSSRRR", [t, i, l, k0, k1, j])
                if I[vt, vi] >= 0 and J[vt, vi, vj] >= 0:
                    T.call_extern(
                        "float32", "atomicAdd", T.address_of(Y[I[vt, vi], vl]),
                        A[vt, vi, vj] * X[J[vt, vi, vj], vk0 * 4 + vk1] * W[vt, vk0 * 4 + vk1, vl],
                    )  # fmt: skip


def apart(func: Any = products) -> Any:
    return sum_then_matmul(func, "sums", outer=1, dtype="float32")


def on_threads() -> Any:
    func = cooperative_gather(apart(), "sums_gather", warps=1, vector=4)
    func = cooperative_copy(func, "sums_matrix", warps=1, vector=4)
    func = thread_tiled_matmul(func, "sums_product", SUM_STEPS, warps=1, shape=(4, 4))
    return software_pipeline(func, "sums_visit", ["sums_gather", "sums_matrix"], stages=2)


def test_sum_golden() -> None:
    """The sums apart, and all passes one after the other."""
    assert plain_text(apart()) == golden("sum_then_matmul")
    assert plain_text(on_threads()) == golden("sum_then_matmul_on_threads")


@T.prim_func(s_tir=True)
def dots(
    I: T.Buffer((3, 16), "int32"), J: T.Buffer((3, 16, 2), "int32"),
    E: T.Buffer((3, 16, 2), "int32"), X: T.Buffer((9, 32), "float32"),
    W: T.Buffer((3, 32, 8), "float32"), G: T.Buffer((20, 8), "float32"),
    Y: T.Buffer((96,), "float32"),
) -> None:  # fmt: skip
    """Two elements of each row, in three tiles of rows, 8 features of these in two steps."""
    for t in T.thread_binding(3, thread="blockIdx.x"):
        for i, j, k, l0, l1 in T.grid(16, 2, 32, 2, 4):
            with T.sblock("dots"):
                vt, vi, vj, vk, vl0, vl1 = T.axis.remap("SSSRRR", [t, i, j, k, l0, l1])
                if I[vt, vi] >= 0 and J[vt, vi, vj] >= 0:
                    T.call_extern(
                        "float32", "atomicAdd", T.address_of(Y[E[vt, vi, vj]]),
                        X[J[vt, vi, vj], vk]
                        * (W[vt, vk, vl0 * 4 + vl1] * G[I[vt, vi], vl0 * 4 + vl1]),
                    )  # fmt: skip


def dots_apart(func: Any = dots) -> Any:
    return matmul_then_dot(func, "dots", outer=1)


def dots_on_threads() -> Any:
    func = dots_apart()
    steps = ["dots_gather", "dots_matrix"]
    for step in steps:
        func = cooperative_copy(func, step, warps=1, vector=4)
    func = thread_tiled_matmul(
        func, "dots_product", ["dots_start", "dots_write"], warps=1, shape=(4, 4)
    )
    func = software_pipeline(func, "dots_visit", steps, stages=2)
    return cooperative_dot(func, "dots_dots", warps=1, vector=4)


def test_golden_of_products_first() -> None:
    assert plain_text(dots_apart()) == golden("matmul_then_dot")
    assert plain_text(dots_on_threads()) == golden("matmul_then_dot_on_threads")


def edited(*changes: tuple[str, str], of: Any = products) -> Any:
    """The products with some of their text changed."""
    from tvm.script import from_source

    text = of.script()
    for old, instead in changes:
        assert old in text, text
        text = text.replace(old, instead)
    return from_source(text, s_tir=True)


STEP = "sums_product"
ATOMIC, SUMMED, TERMS = ("atomicAdd", "atomicMax"), (" * W[vt, vk0 * 4 + vk1, vl]", ""), (
    "W[vt, vk0 * 4 + vk1, vl]", "W[vt, vk1, vl]")  # fmt: skip
REFUSED_SUMS = """
sum_then_matmul(products, "none", outer=1, dtype="float32")
    sum_then_matmul: expected a block in loops, among ['sums'], got 'none'
apart(edited(ATOMIC))  # argument 'block': expected an element to be added to atomically, got
apart(edited(SUMMED))  # expected products of what is gathered for a row with a matrix over columns
apart(edited(TERMS))  # expected a matrix over steps, terms and columns alone, in tiles of constant
apart(edited(("J[vt, vi, vj] >= 0", "J[vt, vi, vj] >= vl")))
    expected conditions of what is gathered, of the matrix or of the result alone
dots_apart(edited(ATOMIC, of=dots))
    matmul_then_dot: argument 'block': expected an element to be added to atomically
matmul_then_dot(products, "sums", outer=1)
    expected products with a matrix for rows of two loops, got
dots_apart(edited(("J[vt, vi, vj] >= 0", "J[vt, vi, vj] >= vl1"), of=dots))
    expected conditions of one factor, or of an element, alone
cooperative_dot(dots_apart(), "dots_dots", warps=1, vector=8)
    cooperative_dot: argument 'vector': expected a divisor of 32 neighbours, of at mos
cooperative_dot(dots_apart(), "dots_gather", warps=1, vector=4)
    cooperative_dot: argument 'dots': expected a block that adds products of rows, one
cooperative_gather(apart(), "sums_gather", warps=1, vector=8)
    argument 'vector': expected a divisor of 4 neighbours, of at most 16 bytes, got
cooperative_gather(apart(), "sums_matrix", warps=1, vector=4)
    argument 'gather': expected a block that sets a sum to zero and adds rows to it
thread_tiled_matmul(apart(), STEP, SUM_STEPS, warps=1, shape=(4, 8))
    argument 'shape': expected 32 tiles that make 16 by 32 sums, got (4, 8)
thread_tiled_matmul(apart(), "sums_start", SUM_STEPS, warps=1, shape=(4, 4))
    argument 'reduce': expected X[..] = X[..] + A[..] * B[..] of A and B in shared
thread_tiled_matmul(apart(), STEP, SUM_STEPS[:1], warps=1, shape=(4, 4))
    argument 'steps': expected the blocks of all accesses of the sums, got Y_ws
thread_tiled_matmul(apart(), STEP, [*SUM_STEPS, "sums_matrix"], warps=1, shape=(4, 4))
    argument 'steps': expected loops over rows and columns of the sums around block
"""


@pytest.mark.parametrize(("_", "code", "words"), table(REFUSED_SUMS))
def test_sums_refused(_: str, code: str, words: list[str]) -> None:
    says(code, words, globals(), ScheduleError)


@pytest.mark.parametrize("index", ["k * 72 + 24", "k * 72 - 24", "k * 72"])
def test_constants_are_added_to_addresses(index):
    tiles = tirx.decl_buffer((4096,), "float16", "tiles", scope="shared")
    k = tirx.Var("k", "int32")
    place = tirx.address_of(tirx.BufferLoad(tiles, [eval(index, {"k": k})]))
    call = tirx.Evaluate(tirx.call_intrin("uint32", CONVERT, place))
    body = shared_addresses(tirx.PrimFunc([k], call)).body.value
    if "+" not in index:
        assert body.same_as(call.value)
    else:
        assert str(body.a.args[0].args[0]) == "tiles[k * 72]" and int(body.b) == 48
