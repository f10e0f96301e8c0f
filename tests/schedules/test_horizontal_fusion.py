"""Many nests on one grid: the text, runs as OpenCL and as CUDA on a CPU, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.script import tirx as TIR

from gpu_runner import OpenCLFunction, requires_opencl
from schedule_common import says, table
from sparsetir.schedules.gpu.passes.horizontal_fuse import horizontal_fuse
from sparsetir.schedules.passes.launches import count_launches
from sparsetir.sparse_ir.errors import ScheduleError
from stage2 import golden, plain_text

# --- three nests of different shapes ------------------------------------------------------------


@TIR.prim_func(s_tir=True)
def three(
    x: TIR.handle, left: TIR.handle, right: TIR.handle, total: TIR.handle,
    m: TIR.int32, n: TIR.int32, w: TIR.int32,
) -> None:  # fmt: skip
    TIR.func_attr({"tirx.noalias": True})
    X = TIR.match_buffer(x, (m, 32), "float32")
    LEFT = TIR.match_buffer(left, (m, 32), "float32")
    RIGHT = TIR.match_buffer(right, (n * w, 8), "float32")
    TOTAL = TIR.match_buffer(total, (m,), "float32")
    for i in TIR.thread_binding(m, thread="blockIdx.x"):
        for k in TIR.thread_binding(32, thread="threadIdx.x"):
            with TIR.sblock("left"):
                vi, vk = TIR.axis.remap("SS", [i, k])
                LEFT[vi, vk] = X[vi, vk] + TIR.float32(1)
    for i in TIR.thread_binding(n, thread="blockIdx.y"):
        for j in TIR.thread_binding(w, thread="blockIdx.x"):
            for k in TIR.thread_binding(8, thread="threadIdx.x"):
                with TIR.sblock("right"):
                    vi, vj, vk = TIR.axis.remap("SSS", [i, j, k])
                    RIGHT[vi * w + vj, vk] = TIR.cast(vi * 100 + vj * 10 + vk, "float32")
    for o in TIR.thread_binding((m + 3) // 4, thread="blockIdx.x"):
        for i in TIR.thread_binding(4, thread="threadIdx.y"):
            for k in range(32):
                with TIR.sblock("total"):
                    vi = TIR.axis.spatial(m, o * 4 + i)
                    vk = TIR.axis.reduce(32, k)
                    TIR.where(o * 4 + i < m)
                    with TIR.init():
                        TOTAL[vi] = TIR.float32(0)
                    TOTAL[vi] = TOTAL[vi] + X[vi, vk]


def test_golden() -> None:
    before = tvm_ffi.structural_hash(three)
    fused = horizontal_fuse(three)
    assert plain_text(fused) == golden("horizontal_fusion")
    assert s_tir.analysis.verify_well_formed(fused)
    assert tvm_ffi.structural_hash(three) == before


# --- nests whose threads work together ----------------------------------------------------------


@TIR.prim_func(s_tir=True)
def together(
    x: TIR.handle, back: TIR.handle, total: TIR.handle, plain: TIR.handle,
    m: TIR.int32, n: TIR.int32,
) -> None:  # fmt: skip
    TIR.func_attr({"tirx.noalias": True})
    X = TIR.match_buffer(x, (m, 64), "float32")
    BACK = TIR.match_buffer(back, (m, 64), "float32")
    TOTAL = TIR.match_buffer(total, (m,), "float32")
    PLAIN = TIR.match_buffer(plain, (n, 64), "float32")
    with TIR.sblock("root"):
        S = TIR.sblock_alloc_buffer((64,), "float32", scope="shared")
        for i in TIR.thread_binding(m, thread="blockIdx.x"):
            for k in TIR.thread_binding(64, thread="threadIdx.x"):
                with TIR.sblock("load"):
                    vi, vk = TIR.axis.remap("SS", [i, k])
                    S[vk] = X[vi, vk]
            for k in TIR.thread_binding(64, thread="threadIdx.x"):
                with TIR.sblock("back"):
                    vi, vk = TIR.axis.remap("SS", [i, k])
                    BACK[vi, vk] = S[63 - vk]
        for i in TIR.thread_binding(m, thread="blockIdx.x"):
            for k in TIR.thread_binding(64, thread="threadIdx.x"):
                with TIR.sblock("total"):
                    vi, vk = TIR.axis.remap("SR", [i, k])
                    with TIR.init():
                        TOTAL[vi] = TIR.float32(0)
                    TOTAL[vi] = TOTAL[vi] + X[vi, vk]
        for i in TIR.thread_binding(n, thread="blockIdx.x"):
            for k in TIR.thread_binding(64, thread="threadIdx.x"):
                with TIR.sblock("plain"):
                    vi, vk = TIR.axis.remap("SS", [i, k])
                    PLAIN[vi, vk] = TIR.float32(2)


# --- which nests are fused -----------------------------------------------------------------------


def nests(*bodies: str, allocate: str = "pass", params: str = "") -> tirx.PrimFunc:
    """A function with these top-level nests over the buffers X, Y, Z and N."""
    lines = [
        "@T.prim_func(s_tir=True)",
        "def f(x: T.handle, y: T.handle, z: T.handle, c: T.handle, m: T.int32):",
        "    X = T.match_buffer(x, (m, 8), 'float32')",
        "    Y = T.match_buffer(y, (m, 8), 'float32')",
        "    Z = T.match_buffer(z, (m, 8), 'float32')",
        "    N = T.match_buffer(c, (m,), 'int32')",
        "    with T.sblock('root'):",
        f"        {allocate}",
        *(f"        {line}" for body in bodies for line in body.strip().splitlines()),
    ]
    return tvm.script.from_source("\n".join(lines))


def nest(
    name: str, store: str, blocks: str = "m", threads: str = "8", tag: str = "threadIdx.x"
) -> str:
    """A nest over rows in blocks and columns in threads."""
    return f"""
for i in T.thread_binding({blocks}, thread="blockIdx.x"):
    for k in T.thread_binding({threads}, thread="{tag}"):
        with T.sblock("{name}"):
            vi, vk = T.axis.remap("SS", [i, k])
            {store}
"""


ATOMIC = 'T.evaluate(T.call_extern("float32", "atomicAdd", T.address_of({}), T.float32(1)))'
ONE = nest("one", "X[vi, vk] = T.float32(1)")
TWO = nest("two", "Y[vi, vk] = T.float32(2)")
HOST = """
for i, k in T.grid(m, 8):
    with T.sblock("two"):
        vi, vk = T.axis.remap("SS", [i, k])
        Y[vi, vk] = T.float32(2)
"""
HOST_LOOP = "for s in range(m):\n" + "\n".join(f"    {n}" for n in TWO.strip().splitlines())
SHARED = """
for i in T.thread_binding(m, thread="blockIdx.x"):
    for k in T.thread_binding(8, thread="threadIdx.x"):
        with T.sblock("two"):
            vi, vk = T.axis.remap("SS", [i, k])
            S[vk] = Y[vi, vk]
    for k in T.thread_binding(8, thread="threadIdx.x"):
        with T.sblock("three"):
            vi, vk = T.axis.remap("SS", [i, k])
            Y[vi, vk] = S[7 - vk]
"""
REDUCTION = """
for i in T.thread_binding(m, thread="blockIdx.x"):
    for k in T.thread_binding(8, thread="threadIdx.x"):
        with T.sblock("two"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                Y[vi, 0] = T.float32(0)
            Y[vi, 0] = Y[vi, 0] + Z[vi, vk]
"""
REDUCTION_OVER_BLOCKS = """
for i in T.thread_binding(8, thread="threadIdx.x"):
    for k in T.thread_binding(m, thread="blockIdx.x"):
        with T.sblock("two"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                Y[0, vi] = T.float32(0)
            Y[0, vi] = Y[0, vi] + Z[vk, vi]
"""
CALL = nest("two", 'T.evaluate(T.call_extern("float32", "wait_for_all", Y[vi, vk]))')
SHARED_ALLOC = 'S = T.sblock_alloc_buffer((8,), "float32", scope="shared")'
WIDE = nest("one", "X[vi, vk % 8] = T.float32(1)", threads="32")

POINTER = nest("two", 'T.evaluate(T.call_extern("int32", "f", T.address_of(X[vi, vk])))')
MANY = nest("one", "X[vi, vk % 8] = T.float32(1)", threads="512")
ADDING, READING = nest("one", ATOMIC.format("X[vi, vk]")), nest("two", "Y[vi, vk] = X[vi, vk]")
FIRST_READS, TWO_OF_X = (
    nest("one", "Z[vi, vk] = X[vi, vk]"),
    nest("two", "X[vi, vk] = T.float32(2)"),
)


def two(**options: str) -> str:
    return nest("two", "Y[vi, vk] = T.float32(2)", **options)


REFUSED = """
ONE, HOST  # nest 'two': expected loops bound to blocks and threads, got none (host code)
ONE, HOST_LOOP  # nest 'two': expected one launch, got one for each step of the host's loop 's'
ONE, two(threads="m")  # nest 'two': expected a constant number of threads (threadIdx.x), got m
ONE, two(blocks="N[0]")
    nest 'two': expected a number of blocks (blockIdx.x) that follows from the param
ONE, REDUCTION_OVER_BLOCKS
    nest 'two': expected blocks that write for themselves, got a reduction over blockIdx.x
ONE, two(tag="vthread.x")
    nest 'two': expected loops over blocks and threads, got one over vthread.x
MANY, two(tag="threadIdx.y")
    nest 'two': expected at most 1024 threads, got 4096 as {'threadIdx.x': 512, .. together with
WIDE, SHARED
    nest 'two': expected 32 threads along threadIdx.x .. work together ('S' in shared memory), got 8
WIDE, REDUCTION  # nest 'two': expected 32 threads .. (a reduction over threadIdx.x), got 8
WIDE, CALL  # nest 'two': expected 32 threads .. (a call of wait_for_all), got 8
ONE, nest("two", "Y[vi, vk] = X[vi, 0]")
    nests 'one' and 'two': expected no order between them, but one writes 'X' .. name it in
ONE, TWO_OF_X  # nests 'one' and 'two': .. writes 'X'
ADDING, TWO_OF_X  # nests 'one' and 'two': .. writes 'X'
ADDING, READING  # nests 'one' and 'two': .. writes 'X'
FIRST_READS, POINTER  # nests 'one' and 'two': .. writes 'X'
"""


@pytest.mark.parametrize(("_", "code", "words"), table(REFUSED))
def test_refused(_: str, code: str, words: list[str]) -> None:
    func = nests(*eval(code, globals()), allocate=SHARED_ALLOC)
    call = "horizontal_fuse(func, ['one', 'two'])"
    message = says(call, words, {**globals(), "func": func}, ScheduleError)
    assert message.startswith("horizontal_fuse: ")
    # Without names there is no refusal, and nothing changes.
    assert tvm_ffi.structural_equal(horizontal_fuse(func), func)


def test_refusal_to_move_a_nest_over_another() -> None:
    func = nests(
        ONE, nest("between", "Z[vi, vk] = Y[vi, vk]"), nest("two", "Y[vi, vk] = T.float32(2)")
    )
    message = "nest 'two': expected to move before 'between', .* writes 'Y' and the other uses it"
    with pytest.raises(ScheduleError, match=message):
        horizontal_fuse(func, ["one", "two"])
    assert count_launches(horizontal_fuse(func)) == 2  # the first two


def test_refusal_of_unknown_names() -> None:
    with pytest.raises(ScheduleError, match="'names'.*got 'three', which 0 nests have.*'one'"):
        horizontal_fuse(nests(ONE, TWO), ["one", "three"])
    with pytest.raises(ScheduleError, match="'names'.*got 'one', which 2 nests have"):
        horizontal_fuse(nests(ONE, ONE, TWO), ["one", "two"])
    with pytest.raises(ScheduleError, match=r"'independent': .* \['X', 'Y'\], got 'W'"):
        horizontal_fuse(nests(ONE, TWO), independent=["W"])


def test_what_the_caller_vouches_for() -> None:
    """Buffers, given by name, where nests use different elements."""
    update = "X[vi, vk] = X[vi, vk] + T.float32({})"
    init, one, two = ONE.replace("one", "init"), nest("one", update.format(1)), nest("two", update)
    two = nest("two", update.format(2))
    func = nests(init, one, two)
    assert count_launches(horizontal_fuse(func)) == 3
    assert count_launches(horizontal_fuse(func, independent=["X"])) == 2
    assert count_launches(horizontal_fuse(func, ["init", "one", "two"], independent=["X"])) == 1


def test_memory_under_two_names_keeps_nests_apart() -> None:
    func = nests(
        nest("one", "Y[vi, vk] = X[vi, vk]"), nest("two", "Z[vi, vk] = V[(m - 1 - vi) * 8 + vk]"),
        allocate="V = T.decl_buffer((m * 8,), 'float32', data=Y.data)",
    )  # fmt: skip
    assert count_launches(horizontal_fuse(func)) == 2


def test_a_limit_of_threads() -> None:
    func = nests(ONE, nest("two", "Y[vi, vk % 8] = T.float32(2)", threads="64"))
    assert count_launches(horizontal_fuse(func, max_threads=64)) == 1
    assert count_launches(horizontal_fuse(func, max_threads=32)) == 2


@requires_opencl
def test_loops_of_different_types() -> None:
    """64-bit loops in one nest, 32-bit loops in another."""
    wide = nest(
        "two", "Y[vi, vk] = T.float32(2)", blocks="T.Cast('int64', m)", threads="T.int64(4)"
    )
    for bodies in ([ONE, wide], [wide, ONE]):
        function = OpenCLFunction(horizontal_fuse(nests(*bodies)))
        x, y, z = (np.zeros((5, 8), "float32") for _ in range(3))
        values = dict(zip([p.name for p in function._params], [x, y, z, np.zeros(5, "int32"), 5]))
        out = function(values)
        x, y = out["X"], out["Y"]
        assert (x == 1).all() and (y[:, :4] == 2).all() and (y[:, 4:] == 0).all()
        assert len(function.launches) == 1
