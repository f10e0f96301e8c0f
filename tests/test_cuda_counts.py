"""What `cuda_runner` counts: sectors, lanes, shuffles, atomics and their conflicts, blocks."""

from __future__ import annotations

import numpy as np
import pytest

import cuda_runner
from cuda_runner import CudaText, requires_cuda_text

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
