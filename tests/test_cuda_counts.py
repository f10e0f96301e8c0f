"""What `cuda_runner` counts, and its tensor cores and asynchronous copies."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuda_runner
from cuda_runner import CudaText, KernelError, requires_cuda_text

pytestmark = requires_cuda_text


def counts(body: str, lanes: int = 32, blocks: int = 1) -> dict[str, int]:
    """Of a kernel over 4096 float32, whose address is a multiple of 64."""
    memory = np.zeros(4096 + 16, "float32")
    at = -(-memory.ctypes.data // 64) * 64
    text = f'extern "C" __global__ void k(float* x) {{ int t = threadIdx.x; {body} }}'
    with cuda_runner.watched(races=False, count=True):
        cuda_runner.add_buffer("x", at, 4096 * 4, 4)
        CudaText(text).launch("k", (blocks, 1, 1), (lanes, 1, 1), [(None, at)])
        found = cuda_runner._runtime().cuda_counts().contents
        return {name: getattr(found, name) for name, _ in found._fields_}


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
    found = counts("x[t] = 1; if (t < 8) x[t] = 2;")
    assert (found["instructions"], found["lanes"]) == (2, 40)
    found = counts("x[t] = 1; if (blockIdx.x) x[t] = 2;", lanes=64, blocks=3)
    assert (found["instructions"], found["lanes"]) == (2 + 4 + 4, 320)
    assert (found["longest_block"], found["blocks"], found["longest_warp"]) == (4, 3, 2)


def test_atomics_and_shuffles():
    """Lanes that change one address of one instruction come one after the other."""
    for body, conflicts in (("atomicAdd(x, 1);", 31), ("atomicAdd(x + t / 2, 1);", 16)):
        found = counts(body)
        assert (found["atomics"], found["conflicts"]) == (32, conflicts)
    found = counts("__shfl_sync(~0u, t, 0); __syncthreads();")
    assert (found["shuffles"], found["barriers"], found["sectors"]) == (32, 1, 0)


def launch(text: str, *arrays: np.ndarray, seeds=(0, 1)) -> None:
    for seed in seeds:
        with cuda_runner.watched():
            for n, a in enumerate(arrays):
                cuda_runner.add_buffer(f"arg{n}", a.ctypes.data, a.nbytes, a.itemsize)
            values = [(None, a.ctypes.data) for a in arrays]
            CudaText(text, "sm_80").launch("k", (1, 1, 1), (32, 1, 1), values, seed=seed)


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
    launch(text, *bits, c, seeds=(0,))
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
    launch(text, a, out)
    for number, tile in enumerate((a[:8, :8], a[8:, :8], a[:8, 8:], a[8:, 8:])):
        np.testing.assert_array_equal(out[number], tile.T if transposed else tile)


def test_a_wait_for_too_few_copies_shows():
    """What the second stage copies is not there: the matrix holds NaN."""
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
