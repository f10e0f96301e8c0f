"""Tests of `cuda_runner`, on text written by hand: values, and what is found."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportMissingModuleSource=false

from __future__ import annotations

import mmap
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tvm.script import tirx as T

import cuda_runner
from cuda_runner import CudaFunction, CudaText, KernelError, requires_cuda_text, run_cuda
from refusals import refusals

pytestmark = requires_cuda_text


def launch(text: str, *args: Any, block: Any = (32, 1, 1), grid: Any = (1, 1, 1), **options: Any):
    """Run the kernel `k` of a text on arrays, which it changes, and on int32."""
    seed, dynamic = options.pop("seed", 0), options.pop("dynamic", 0)
    with cuda_runner.watched(**options):
        values = []
        for number, arg in enumerate(args):
            if isinstance(arg, np.ndarray):
                name, address = f"arg{number}", arg.ctypes.data
                cuda_runner.add_buffer(name, address, arg.nbytes, arg.itemsize)
                values.append((None, address))
            else:
                values.append((np.dtype("int32"), arg))
        CudaText(text, "sm_80").launch("k", grid, block, values, dynamic, seed)


def kernel(parameters: str, body: str) -> str:
    return f'extern "C" __global__ void k({parameters}) {{\n  int t = threadIdx.x;\n{body}\n}}\n'


# --- values ----------------------------------------------------------------------------------


def test_shuffles_of_any_width():
    """Against what CUDA's manual says, lane by lane."""
    widths, by = (2, 4, 8, 16, 32), 3
    lines = [
        f"  out[{4 * n + m} * 32 + t] = __shfl{kind}_sync(0xffffffffu, t * 10, {by}, {w});"
        for n, w in enumerate(widths)
        for m, kind in enumerate(("", "_up", "_down", "_xor"))
    ]
    out = np.zeros((len(widths), 4, 32), "int32")
    launch(kernel("int* out", "\n".join(lines)), out)
    for n, w in enumerate(widths):
        for t in range(32):
            first, last = t // w * w, t // w * w + w - 1
            sources = [
                first + by % w,
                t - by if t - by >= first else t,
                t + by if t + by <= last else t,
                t ^ by if t ^ by <= last else t,
            ]
            np.testing.assert_array_equal(out[n, :, t], 10 * np.array(sources))


def test_votes_and_lanes_of_a_branch():
    out = np.zeros((5, 32), "int64")
    text = kernel(
        "long* out",
        """
  out[t] = __ballot_sync(0xffffffffu, t % 3 == 0);
  if (t < 12) {
    out[32 + t] = __activemask();
    out[64 + t] = __shfl_down_sync(0xfffu, t * 1.0, 4, 32);
    out[96 + t] = __any_sync(0xfff, t == 11) + 2 * __all_sync(0xfff, t < 11);
  }
  __syncwarp();
  out[128 + t] = __all_sync(~0u, 1);""",
    )
    for seed in range(3):
        launch(text, out, seed=seed)
        assert set(out[0]) == {sum(1 << t for t in range(0, 32, 3))}
        assert list(out[1]) == [0xFFF] * 12 + [0] * 20
        assert list(out[2, :8]) == list(range(4, 12)) and set(out[3, :12]) == {1}
        assert set(out[4]) == {1}


def test_what_lanes_that_ended_give_is_nan():
    out = np.zeros((2, 32), "float32")
    body = "  if (t >= 20) return;\n  out[t] = __shfl_down_sync(0xffffffffu, 1.0f, 8, 32);"
    launch(kernel("float* out", body), out)
    assert (out[0, :12] == 1).all() and np.isnan(out[0, 12:20]).all()


ADDED = ["int", "unsigned", "unsigned long long", "float", "double", "half", "nv_bfloat16"]
NUMPY = ["int32", "uint32", "uint64", "float32", "float64", "float16", ml_dtypes.bfloat16]


def test_atomics():
    """Sums of all types that CUDA adds; the largest and least; a swap that one thread wins."""
    lines = [f"  atomicAdd(a{n} + t % 3, ({kind})1);" for n, kind in enumerate(ADDED)]
    lines += [
        "  atomicMax(m, t); atomicMin(m + 1, -t);",
        "  if (atomicCAS(m + 2, 0, t + 1) == 0) atomicAdd(m + 3, 1);",
        "  atomicAdd((half2*)h, half2((half)1, (half)2));",
    ]
    parameters = ", ".join(f"{kind}* a{n}" for n, kind in enumerate(ADDED))
    arrays = [np.zeros(3, dtype) for dtype in NUMPY]
    most, pair = np.zeros(4, "int32"), np.zeros(2, "float16")
    viewed = [a.view("uint16") if a.dtype.itemsize == 2 else a for a in (*arrays, most, pair)]
    text = kernel(f"{parameters}, int* m, half* h", "\n".join(lines))
    launch(text, *viewed, block=(64, 1, 1), seed=1)
    for array in arrays:
        assert list(array.astype("float64")) == [22, 21, 21]
    assert list(most[:2]) == [63, -63] and 1 <= most[2] <= 64 and most[3] == 1
    assert list(pair) == [64, 128]
    with pytest.raises(RuntimeError, match="(?s)atomicAdd.*T = long int"):
        CudaText(kernel("long* a", "  atomicAdd(a, 1L);"))


# --- what is found -------------------------------------------------------------------------------

SUMS = """  __shared__ float S[64];
  S[t] = x[t];
  BARRIER
  if (t < 32) x[t] = S[t] + S[63 - t];"""


def test_a_missing_barrier_is_found():
    x, sums = np.arange(64, dtype="float32"), kernel("float* x", SUMS)
    launch(sums.replace("BARRIER", "__syncthreads();"), x, block=(64, 1, 1))
    assert (x[:32] == 63).all()
    for seed in range(3):
        with pytest.raises(KernelError, match=r"k: race: block 0, thread .* S\[\d+\], which block"):
            launch(sums.replace("BARRIER", ""), x, block=(64, 1, 1), seed=seed)


def test_lanes_are_ordered_by_syncwarp_but_not_by_a_shuffle():
    body = "  x[t] = t;\n  {}\n  float y = x[(t + 1) % 32];\n  __syncwarp();\n  x[t] = y;"
    x = np.zeros(32, "float32")
    launch(kernel("float* x", body.format("__syncwarp();")), x)
    assert list(x[:3]) == [1, 2, 3] and x[31] == 0
    with pytest.raises(KernelError, match=r"race: .* arg0\[\d+\]"):
        launch(kernel("float* x", body.format("__shfl_sync(~0u, t, 0);")), x)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("x[t] = 1;", "if (b) x[t] = 1;"),  # the same value is a race, too
        ("if (b) x[t] = 1;", "else y[t] = x[t];"),
        ("if (b) atomicAdd(x + t, 1);", "else x[t] = 2;"),
        ("if (b) atomicAdd(x + t, 1);", "else y[t] = x[t];"),
    ],
)
def test_blocks_race(first, second):
    x, y = np.zeros(32, "int32"), np.zeros(32, "int32")
    text = kernel("int* x, int* y", f"  int b = blockIdx.x;\n  {first} {second}")
    launch(text, x, y)  # one block alone
    with pytest.raises(KernelError, match=r"race: block \d, .* arg0\[\d+\], which block \d"):
        launch(text, x, y, grid=(2, 1, 1), seed=1)


def test_atomics_and_reads_do_not_race():
    x, y = np.ones(33, "int32"), np.zeros(64, "int32")
    body = "  atomicAdd(x, x[32]); y[blockIdx.x * 32 + t] = x[32];"
    launch(kernel("int* x, int* y", body), x, y, grid=(2, 1, 1))
    assert x[0] == 65 and (y == 1).all()


def test_equal_values_may_be_allowed():
    x = np.zeros(32, "float32")
    text = kernel("float* x, int n", "  x[t] = n ? blockIdx.x : 1;")
    launch(text, x, 0, grid=(3, 1, 1), equal=True)
    with pytest.raises(KernelError, match="race: .*, and with another value"):
        launch(text, x, 1, grid=(3, 1, 1), equal=True)


def wrong(body: str, threads: int = 32) -> None:
    x = np.zeros(32, "float32")
    launch(kernel("float* x, int n", f"  {body}"), x, 1, block=(threads, 1, 1))


test_bounds_and_divergence = refusals(
    r"""
wrong("x[t + n] = 1;")
    # KernelError: out of bounds: block 0, thread (31, 0, 0) writes 4 bytes at +128
wrong("x[t - n] = 1;")  # KernelError: writes 4 bytes at -4 from the begin of arg0
wrong("x[0] = x[32 + 7];")  # KernelError: reads 4 bytes .. of arg0, in no buffer
wrong("if (t == 0) *(float4*)(x + 2 * n) = make_float4(1, 2, 3, 4);")
    # KernelError: misaligned: .. 16 bytes at 8 of arg0
wrong("if (t == 7) *(float2*)(x + 31 + n) = float2();")  # KernelError: out of bounds .. no buffer
wrong("__shared__ float S[32]; S[t + n] = 1;")  # KernelError: out of bounds .. index 32 of an array
wrong("__shared__ float S[32]; *(S + t + n) = 1;")  # KernelError: in no buffer
wrong("float y[4]; y[t] = t; x[t] = y[0] + y[3];")  # KernelError: uses index 4 of an array
wrong("atomicAdd(x + 40, 1);")  # KernelError: changes by an atomic 4 bytes
wrong("if (t < 40) __syncthreads();", 64)
    # KernelError: a __syncthreads that thread 40 ended without
wrong("if (t < 40) __syncthreads();\n  else __syncthreads();", 64)
    # KernelError: thread 0 waits at the __syncthreads of line 5, thread 40 at that of line 6
wrong("if (t % 2) __shfl_sync(~0u, t, 0); else __syncthreads();", 64)
    # KernelError: warp 0: lane 1 is at __shfl_sync .. , which names lane 0, but that one waits at
wrong("if (t % 2) __shfl_sync(~0u, t, 0); else __syncwarp();", 64)
    # KernelError: lane 0 is at __syncwarp with mask 0xffffffff, which names lane 1, but that one
wrong("__syncwarp(2);")  # KernelError: __syncwarp: lane 0 is not in its own mask 0x00000002
""",
    globals(),
)


def test_what_holds_nothing_is_nan():
    x = np.zeros((3, 32), "float32")
    body = """  __shared__ float S[32];
  extern __shared__ float D[];
  x[t] = S[t]; x[32 + t] = D[t];
  __syncthreads();
  unsigned to = __cvta_generic_to_shared(S + t);
  if (t % 4 == 0) asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(to), "l"(y + t), "n"(16));
  asm volatile("cp.async.commit_group;" : :);
  WAIT
  __syncthreads();
  x[64 + t] = S[t];"""  # noqa: E501
    text, y = kernel("float* x, float* y", body), np.arange(32, dtype="float32")
    for block in range(2):  # the second block finds nothing of the first
        launch(text.replace("WAIT", ""), x, y, dynamic=128, races=False, grid=(block + 1, 1, 1))
        assert np.isnan(x).all()
    waits = 'asm volatile("cp.async.wait_group 0;" : : : "memory");'
    launch(text.replace("WAIT", waits), x, y, dynamic=128)
    np.testing.assert_array_equal(x[2], y)


# --- whole functions -----------------------------------------------------------------------------


@T.prim_func(s_tir=True)
def sums_of_blocks(x: T.handle, c: T.handle, n: T.int32, m: T.int32):
    X = T.match_buffer(x, (n,), "float32")
    C = T.match_buffer(c, (m,), "float32")
    S = T.sblock_alloc_buffer(((n + 63) // 64 * 64,), "float32", scope="shared")
    for b in T.thread_binding((n + 63) // 64, "blockIdx.x"):
        for t in T.thread_binding(64, "threadIdx.x"):
            with T.sblock("load"):
                v = T.axis.spatial((n + 63) // 64 * 64, b * 64 + t)
                S[v] = T.if_then_else(v < n, X[v], T.float32(0))
        for t in T.thread_binding(64, "threadIdx.x"):
            with T.sblock("add"):
                vb, vt = T.axis.remap("SS", [b, t])
                T.reads(S[vb * 64 + 63 - vt])
                T.writes(C[0:m])
                T.evaluate(
                    T.call_extern(
                        "float32", "atomicAdd", T.address_of(C[vt % m]), S[vb * 64 + 63 - vt]
                    )
                )


REMOVED = {
    "": ("", ""),
    r"race: block \d+, thread .* S": ("__syncthreads();", ""),
    r"race: block \d+, thread .* C\[": (r"atomicAdd(", "plain_add("),
    r"out of bounds: block \d+, thread .* X, in no buffer": ("< n", "<= n"),
}


@pytest.mark.parametrize("message", REMOVED)
def test_what_is_removed_from_a_kernel_is_found(message):
    """A barrier, an atomic, a bound; with all of them the sums are right."""
    removed, instead = REMOVED[message]

    def edit(source: str) -> str:
        assert removed in source
        plain = "__device__ void plain_add(float* at, float x) { *at += x; }\n"
        return plain + source.replace(removed, instead)

    x = np.random.default_rng(0).random(100, "float32")
    names = [p.name for p in sums_of_blocks.params]
    args = dict(zip(names, [x, np.zeros(7, "float32"), 100, 7], strict=True))
    function = CudaFunction(sums_of_blocks, edit=edit)
    if message:
        with pytest.raises(KernelError, match=f"(?s)sums_of_blocks_kernel: {message}"):
            function(args)
        return
    out = function(args, seeds=range(4), count=True)[names[1]]
    padded = np.concatenate([x, np.zeros(28, "float32")]).reshape(2, 64)[:, ::-1].sum(axis=0)
    sums = [padded[number::7].sum() for number in range(7)]
    np.testing.assert_allclose(out, sums, rtol=1e-5)
    counts = function.counts
    assert (counts.atomics, counts.blocks, counts.barriers) == (128, 2, 2)
    assert counts.conflicts == 128 - 7 * 4 and counts.shuffles == 0
    assert 0 < counts.sectors <= counts.lanes <= 32 * counts.instructions
    (alone,) = function.launch_counts
    assert bytes(alone) == bytes(counts)


def test_seeds_must_agree():
    @T.prim_func(s_tir=True)
    def last(x: T.handle):
        X = T.match_buffer(x, (1,), "int32")
        for b in T.thread_binding(9, "blockIdx.x"):
            with T.sblock("last"):
                v = T.axis.spatial(9, b)
                T.reads()
                T.writes(X[0:1])
                T.evaluate(T.call_extern("int32", "atomicExch", T.address_of(X[0]), v))

    (name,) = [p.name for p in last.params]
    with pytest.raises(KernelError, match=f"{name} depends on the order in which warps run"):
        run_cuda(last, {name: np.zeros(1, "int32")}, seeds=range(8))


def test_offsets_beyond_31_bits():
    """Untouched memory is not allocated; read-only memory is not copied."""

    @T.prim_func(s_tir=True)
    def gather(b: T.handle, i: T.handle, c: T.handle, n: T.int64):
        B = T.match_buffer(b, (n,), "int8")
        rows = T.match_buffer(i, (32,), "int64")
        C = T.match_buffer(c, (32,), "int8")
        for t in T.thread_binding(32, "threadIdx.x"):
            with T.sblock("gather"):
                v = T.axis.spatial(32, t)
                C[v] = B[rows[v]]

    n = (1 << 31) + 4096
    big = np.frombuffer(mmap.mmap(-1, n), "int8")
    rows = n - 1 - np.arange(32, dtype="int64")
    big[rows] = np.arange(32)
    big.flags.writeable = False
    names = [p.name for p in gather.params]
    args = dict(zip(names, [big, rows, np.zeros(32, "int8"), n]))
    out = run_cuda(gather, args)
    np.testing.assert_array_equal(out[names[2]], np.arange(32))
    with pytest.raises(KernelError, match="which is given to be read alone"):
        CudaFunction(gather, edit=lambda s: s.replace("C_ptr[((", "B_ptr[(("))(args)
    rows += 32
    with pytest.raises(KernelError, match="out of bounds: .* reads 1 bytes .* of B"):
        run_cuda(gather, args)


# --- counts, tensor cores, asynchronous copies ---------------------------------------------------


def counts(body: str, lanes: int = 32, blocks: int = 1) -> dict[str, int]:
    """Counts of a kernel over 4096 float32, whose address is a multiple of 64."""
    memory = np.zeros(4096 + 16, "float32")
    address = -(-memory.ctypes.data // 64) * 64
    text = f'extern "C" __global__ void k(float* x) {{ int t = threadIdx.x; {body} }}'
    with cuda_runner.watched(races=False, count=True):
        cuda_runner.add_buffer("x", address, 4096 * 4, 4)
        CudaText(text).launch("k", (blocks, 1, 1), (lanes, 1, 1), [(None, address)])
        counted = cuda_runner._runtime().cuda_counts().contents
        return {name: getattr(counted, name) for name, _ in counted._fields_}


@pytest.mark.parametrize(
    ("body", "sectors"),
    [
        ("x[t] = 1;", 4),  # neighbours: 128 bytes
        ("x[t + 1] = 1;", 5),  # not from the begin of a sector
        ("x[8 * t] = 1;", 32),  # a sector for each lane
        ("x[0] = 1;", 1),
        ("*(float4*)(x + 4 * t) = *(float4*)(x + 512 + 4 * t);", 32),
        ("for (int i = 0; i < 3; ++i) x[32 * i + t] = 1;", 12),
    ],
)
def test_sectors(body, sectors):
    assert counts(body)["sectors"] == sectors


def test_instructions_and_lanes():
    """A branch of 8 lanes is an instruction as one of 32 is; two warps have twice as many."""
    counted = counts("x[t] = 1; if (t < 8) x[t] = 2;")
    assert (counted["instructions"], counted["lanes"]) == (2, 40)
    counted = counts("x[t] = 1; if (blockIdx.x) x[t] = 2;", lanes=64, blocks=3)
    assert (counted["instructions"], counted["lanes"]) == (2 + 4 + 4, 320)
    assert (counted["longest_block"], counted["blocks"], counted["longest_warp"]) == (4, 3, 2)


def test_atomics_and_shuffles():
    """Lanes that change one address of one instruction come one after the other."""
    for body, conflicts in (("atomicAdd(x, 1);", 31), ("atomicAdd(x + t / 2, 1);", 16)):
        counted = counts(body)
        assert (counted["atomics"], counted["conflicts"]) == (32, conflicts)
    counted = counts("__shfl_sync(~0u, t, 0); __syncthreads();")
    assert (counted["shuffles"], counted["barriers"], counted["sectors"]) == (32, 1, 0)


# Lane l's registers, as the PTX manual has it: `.row` of A, `.col` of B, two of C.
MMA = """
extern "C" __global__ void k(%(T)s* A, %(T)s* B, %(S)s* C) {
  int g = threadIdx.x / 4, t = threadIdx.x %% 4;
  unsigned a[4], b[2];
  %(S)s c[4];
  for (int i = 0; i < 4; ++i) {
    a[i] = *(unsigned*)(A + (g + i %% 2 * 8) * %(K)d + i / 2 * %(K)d / 2 + t * %(K)d / 8);
    c[i] = C[(g + i / 2 * 8) * 8 + 2 * t + i %% 2];
  }
  for (int i = 0; i < 2; ++i) b[i] = *(unsigned*)(B + g * %(K)d + i * %(K)d / 2 + t * %(K)d / 8);
  asm volatile(
    "mma.sync.aligned.m16n8k%(K)d.row.col.%(name)s "
    "{%%0, %%1, %%2, %%3}, {%%4, %%5, %%6, %%7}, {%%8, %%9}, {%%10, %%11, %%12, %%13};\\n"
    : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]),
      "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  for (int i = 0; i < 4; ++i) C[(g + i / 2 * 8) * 8 + 2 * t + i %% 2] = c[i];
}
"""


@pytest.mark.parametrize(
    ("kind", "dtype", "name", "k"),
    [
        ("half", "float16", "f32.f16.f16.f32", 16),
        ("nv_bfloat16", ml_dtypes.bfloat16, "f32.bf16.bf16.f32", 16),
        ("signed char", "int8", "s32.s8.s8.s32", 32),
    ],
    ids=["half", "bfloat16", "int8"],
)
def test_mma(kind, dtype, name, k):
    rng, sums = np.random.default_rng(0), "int" if kind == "signed char" else "float"
    a, b = (rng.integers(-9, 9, (n, k)).astype(dtype) for n in (16, 8))
    c = rng.integers(-9, 9, (16, 8)).astype("int32" if sums == "int" else "float32")
    expected = c + a.astype("int64") @ b.astype("int64").T
    bits = [x.view("uint16") if x.itemsize == 2 else x for x in (a, b)]
    text = MMA % {"T": kind, "S": sums, "K": k, "name": name}
    launch(text, *bits, c)
    np.testing.assert_array_equal(c, expected)


# Two stages of copies to shared memory; lane l names row l % 16 of the tile, its half l / 16.
LDMATRIX = """
extern "C" __global__ void k(half* A, half* out) {
  __shared__ alignas(64) half S[256];
  for (int stage = 0; stage < 2; ++stage) {
    unsigned to = __cvta_generic_to_shared(S + stage * 128 + threadIdx.x * 4);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
      :: "r"(to), "l"((uint8_t*)(A + stage * 128 + threadIdx.x * 4)), "n"(8));
    asm volatile("cp.async.commit_group;" : : );
  }
  asm volatile("cp.async.wait_group WAIT;" : : : "memory");
  __syncwarp();
  unsigned r[4];
  unsigned from = __cvta_generic_to_shared(S + threadIdx.x % 16 * 16 + threadIdx.x / 16 * 8);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4TRANS.shared.b16" "{%0, %1, %2, %3}, [%4];\\n"
    : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
  for (int i = 0; i < 4; ++i) *(unsigned*)(out + i * 64 + threadIdx.x * 2) = r[i];
}
"""


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_copies(transposed):
    text = LDMATRIX.replace("TRANS", ".trans" if transposed else "").replace("WAIT", "0")
    a, out = np.arange(256).astype("float16").reshape(16, 16), np.zeros((4, 8, 8), "float16")
    for seed in range(2):
        launch(text, a, out, seed=seed)
    for number, tile in enumerate((a[:8, :8], a[8:, :8], a[:8, 8:], a[8:, 8:])):
        np.testing.assert_array_equal(out[number], tile.T if transposed else tile)


def test_a_wait_for_too_few_copies_shows():
    """The second stage's copies are missing: the matrix holds NaN."""
    text = LDMATRIX.replace("TRANS", "").replace("WAIT", "1")
    a, out = np.zeros((16, 16), "float16"), np.zeros((4, 8, 8), "float16")
    launch(text, a, out)
    assert np.isnan(out[[1, 3]]).all() and (out[[0, 2]] == 0).all()


def test_a_warp_of_fewer_lanes_is_refused():
    text = MMA % {"T": "half", "S": "float", "K": 16, "name": "f32.f16.f16.f32"}
    text = text.replace("  asm", "  if (g == 7) return;\n  asm", 1)
    arrays = np.zeros((16, 16), "float16"), np.zeros((8, 16), "float16"), np.zeros((16, 8), "f4")
    with pytest.raises(KernelError, match="mma.sync: lanes 0x0fffffff alone are there"):
        launch(text, *arrays)
