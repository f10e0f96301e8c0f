"""Tests of `wgmma` in `ptx`: layouts of matrices by the manual's formulas, and what is refused."""

# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ptx import PtxError
from ptx.warpgroups import SWIZZLES
from refusals import refusals
from test_ptx import launch

BYTES = 1 << 15  # of shared memory: 16 KiB for each factor
UNIT = 8  # 16-bit numbers in 16 bytes: T of the manual's "Canonical Layouts"


def place(r: int, k: int, mode: int, by_mn: bool, rows: int) -> tuple[int, int, int]:
    """(element, leading offset, stride offset) of row or column r and term k of a matrix."""
    t, w = UNIT, SWIZZLES[mode]
    if by_mn and w == 1:  # ((T, 1, m), (8, k)) : ((1, T, SBO), (1T, LBO))
        lead, stride = rows * t, 8 * t
        at = r % t + r // t * stride + k % 8 * t + k // 8 * lead
    elif by_mn:  # ((T, w, m), (8, k)) : ((1, T, LBO), (wT, SBO))
        lead, stride = 64 * w * t, 8 * w * t
        at = r % t + r // t % w * t + r // (t * w) * lead + k % 8 * w * t + k // 8 * stride
    else:  # ((8, m), (T, 2k)) : ((wT, SBO), (1, LBO)), and LBO = T with swizzles
        lead, stride = rows * t if w == 1 else t, 8 * w * t
        at = r % 8 * w * t + r // 8 * stride + k % t + k // t * lead
    at ^= (at >> 6 & w - 1) << 3  # Swizzle<log2(w), 4, 3> of bytes
    return at, lead, stride


def stored(x: np.ndarray, mode: int, by_mn: bool, at: int) -> tuple[np.ndarray, int]:
    """The bytes of a matrix, and the descriptor of its last 16 terms if they begin at `at`."""
    out = np.full(BYTES // 4, 7, x.dtype)
    for r, k in np.ndindex(x.shape):
        out[place(r, k, mode, by_mn, len(x))[0]] = x[r, k]
    _, lead, stride = place(0, 0, mode, by_mn, len(x))
    by_term = lead if SWIZZLES[mode] == 1 or not by_mn else stride
    begin = at + 2 * ((x.shape[1] - 16) // 8 * by_term)
    return out.view("uint32"), begin >> 4 | 2 * lead >> 4 << 16 | 2 * stride >> 4 << 32 | mode << 62


def run(body: str, x: np.ndarray, width: int = 8, threads: int = 128) -> Any:
    """The sums %w0, .. of threads after a body, with `x` in shared memory, and counts."""
    out = np.full((threads, width // 2), np.nan, "float32")
    stores = "\n".join(f"st.global.f32 [%d5+{4 * n}], %w{n};" for n in range(width // 2))
    copy = f"""
      .reg .f32 %w<128>; mul.wide.u32 %d5, %r0, {2 * width}; add.s64 %d5, %d5, %d1;
      setp.eq.u32 %p0, %r0, %r0; mov.u32 %r3, S; mad.lo.u32 %r3, %r0, 16, %r3;
      mad.wide.u32 %d3, %r0, 16, %d0; add.s64 %d4, %d0, {BYTES};
      COPY: ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%d3]; add.s64 %d3, %d3, 2048;
      st.shared.v4.u32 [%r3], {{%r4, %r5, %r6, %r7}}; add.u32 %r3, %r3, 2048;
      setp.lt.u64 %p1, %d3, %d4; @%p1 bra COPY;"""
    counts = launch(f"{copy}\n{body}\n{stores}", x, out, threads=threads, dynamic=BYTES, cost=True,
                    shared=".extern .shared .align 1024 .b8 S[];")  # fmt: skip
    return out, counts


def sums(count: int) -> str:
    return "{" + ", ".join(f"%w{n}" for n in range(count)) + "}"


def row_and_column(thread: int, n: int) -> tuple[int, int]:
    """Of sum d_n, and of element a_n, of a thread, by the manual's figures of fragments."""
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (n // 2 % 2)
    return row, 8 * (n // 4) + 2 * (thread % 4) + n % 2


@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize("by_mn", [False, True])
@pytest.mark.parametrize(("mode", "width", "kind"), [
    (0, 8, "float16"), (1, 64, "float16"), (2, 96, "bfloat16"), (3, 128, "float16"),
])  # fmt: skip
def test_layouts(in_registers: bool, by_mn: bool, mode: int, width: int, kind: str) -> None:
    """Both factors of small integers, by each swizzle; A also of registers."""
    dtype, rng = np.dtype(getattr(ml_dtypes, kind, kind)), np.random.default_rng(width)
    rows = 64, -(-width // 64) * 64 if by_mn else width
    depth = 64 if by_mn or mode == 0 else UNIT * SWIZZLES[mode]  # a pattern's, by k
    a, b = (rng.integers(-9, 9, (n, depth)).astype(dtype) for n in rows)
    (first, of_a), (second, of_b) = stored(a, mode, by_mn, 0), stored(b, mode, by_mn, BYTES // 2)
    pairs = [[a[:, -16:][row_and_column(t, n)] for n in range(8)] for t in range(128)]
    x = np.concatenate([first, second, np.array(pairs, dtype).view("uint32").reshape(-1)])
    short, held = {"float16": "f16", "bfloat16": "bf16"}[kind], "{%r10, %r11, %r12, %r13}"
    left, flags = (held if in_registers else "%d6"), ", 1" * by_mn or ", 0"

    def product(adds: str, sign: int) -> str:
        return f"""
          wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{short}.{short}
          {sums(width // 2)}, {left}, %d7, {adds}, {sign}, 1{flags * (2 - in_registers)};"""

    body = f"""
      mad.wide.u32 %d3, %r0, 16, %d0; ld.global.v4.u32 {held}, [%d3+{BYTES}];
      fence.proxy.async; bar.sync 0; mov.b64 %d6, {of_a}; mov.b64 %d7, {of_b};
      setp.ne.u32 %p2, %r0, %r0; wgmma.fence.sync.aligned; {product("%p2", 1)}
      {product("%p0", 1)} {product("%p0", -1)} {product("%p0", 1)}
      wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"""
    out, counts = run(body, x, width)
    exact = 2 * a[:, -16:].astype("float32") @ b[:width, -16:].astype("float32").T
    for t, n in np.ndindex(out.shape):
        assert out[t, n] == exact[row_and_column(t, n)], (t, n)
    assert counts["tensor operations"] == 4 * 2 * 64 * width * 16
    reads = 4 * (16 * (not in_registers) + width // 4)
    assert counts["shared passes"] == counts["least passes"] == BYTES // 128 + reads


PRODUCT = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {sums(4)}"
STEPS = {
    "show": "fence.proxy.async.shared::cta;", "barrier": "bar.sync 0;",
    "fence": "wgmma.fence.sync.aligned;", "product": f"{PRODUCT}, %d6, %d6, %p0, 1, 1, 0, 0;",
    "of registers": f"{PRODUCT}, {{%r4, %r5, %r6, %r7}}, %d6, %p0, 1, 1, 0;",
    "commit": "wgmma.commit_group.sync.aligned;", "wait": "wgmma.wait_group.sync.aligned 0;",
    "wait 1": "wgmma.wait_group.sync.aligned 1;",
    "write": "mov.u32 %r3, S; mad.lo.u32 %r3, %r0, 4, %r3; st.shared.u32 [%r3], %r0;",
}  # fmt: skip
READY, DONE = ("show", "barrier", "fence"), ("commit", "wait")


def steps(*names: str, at: int = 8 << 16 | 16 << 32, threads: int = 128) -> None:
    """Run steps by their names, or other statements, with a matrix's descriptor in %d6."""
    body = "\n".join(STEPS.get(name, name) for name in names)
    begin = f"mov.b64 %d6, {at}; mov.f32 %w0, 0f00000000;"
    run(f"{begin} {body}", np.zeros(BYTES // 4, "uint32"), threads=threads)


def test_orders_that_are_right() -> None:
    """Several products of a fence, groups that are waited for in order, and memory used again."""
    steps(*READY, "product", "product", *DONE, "fence", "product", *DONE, "barrier", "write")
    two = "product", "commit", "of registers", "commit", "wait 1", "wait"
    steps(*READY, *two, "add.u32 %r4, %r4, 1;")


test_refusals = refusals(
    """
steps(*READY, "product", "commit", "mov.f32 %w9, %w2;", "wait")
    # PtxError: reads %w2, which a wgmma uses that is not waited for
steps(*READY, "product", "commit", "product", "commit", "wait 1")  # PtxError: reads %w0
steps(*READY, "of registers", "add.u32 %r5, %r0, 1;", *DONE)
    # PtxError: writes %r5, which a wgmma uses that is not waited for
steps("show", "barrier", "product", *DONE)
    # PtxError: wgmma uses %w0, which was used after the last wgmma.fence
steps(*READY, "mov.u32 %r9, %r6;", "of registers", *DONE)
    # PtxError: wgmma uses %r6, which was used after the last wgmma.fence
steps("barrier", "fence", "product", *DONE)
    # PtxError: wgmma reads what a thread wrote that has no fence.proxy.async since
steps("show", "fence", "product", *DONE)  # PtxError: race: .. reads dynamic shared memory[byte
steps(*READY, "product", "barrier", "write", *DONE)
    # PtxError: writes where a wgmma reads that is not waited for
steps(*READY, "product", "barrier", *DONE, "write")
    # PtxError: race: .. writes dynamic shared memory[byte .. which .. read, with no barrier
steps(*READY, "product", *DONE, at=1 << 62 | 24)  # PtxError: misaligned: a pattern of 128 bytes
steps(*READY, "product", *DONE, at=1 << 49)  # PtxError: misaligned: a pattern
steps(*READY, "cvt.u64.u32 %d6, %r0;", "product", *DONE)
    # PtxError: wgmma: descriptors differ in a warpgroup
steps(*READY, "product", *DONE, threads=96)  # PtxError: wgmma: threads of a warpgroup do not come
steps(STEPS["product"].replace("f32.f16.f16", "f16.f16.f16"))  # PtxError: not known: wgmma
steps("fence.proxy.alias;")  # PtxError: not known: fence.proxy.alias
""",
    {"steps": steps, "PtxError": PtxError, "READY": READY, "DONE": DONE, "STEPS": STEPS},
)
