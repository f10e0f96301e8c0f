"""Machine code for CPUs that run none of the tests: what their innermost loops are made of."""

from __future__ import annotations

import re

import numpy as np
import pytest
import scipy.sparse

import sparsetir
from kernel_common import right
from programs import PROGRAMS
from sparsetir.machine import real_machine

NEOVERSE = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"}
TARGETS = {
    "neoverse-n1": NEOVERSE,
    "neoverse-v2": {**NEOVERSE, "mcpu": "neoverse-v2"},
    "apple-m1": {**NEOVERSE, "mtriple": "arm64-apple-macos", "mcpu": "apple-m1"},
}
A = scipy.sparse.random(2000, 2000, 0.01, "csr", "float32", rng=np.random.default_rng(0))
NO_CODE = re.compile(r"L?\.?Ltmp|\s*[;#/.]")


def innermost(text: str) -> list[list[str]]:
    """The innermost loops of a function's code: from a label to a branch back to it."""
    lines = [x for x in text.splitlines() if not NO_CODE.match(x) or re.match(r"\.?LBB\w+:", x)]
    labels = {line.partition(":")[0]: n for n, line in enumerate(lines) if ":" in line}
    loops = []
    for end, line in enumerate(lines):
        name = re.match(r"\s+(?:b\.?\w*|cbn?z|tbn?z)\s.*?(\.?LBB\w+)$", line)
        start = labels.get(name[1], end) if name else end
        body = lines[start + 1 : end]
        if start < end and not any(":" in x for x in body):
            loops.append(body)
    return loops


def count(body: list[str], words: str) -> int:
    return sum(bool(re.match(rf"\s+(?:{words})\b", line)) for line in body)


@pytest.mark.parametrize("cpu", TARGETS)
def test_sums_of_a_product_stay_in_the_registers_of_arm(cpu):
    """32 registers of 4 floats: 16 hold sums, and an element's value and column are loaded once."""
    text = sparsetir.plan("spmm", A, 64, target=TARGETS[cpu], threads=1).kernel.source("asm")
    loops = innermost(text)
    widest = max(loops, key=lambda body: count(body, "fmla"))
    assert count(widest, "fmla") == 16
    assert count(widest, "ldp") == 8  # of 2 vectors each
    assert count(widest, "ld.*") <= 11 and count(widest, "st.*|dup|fmul") == 0
    assert not [line for body in loops for line in body if "[sp" in line]  # nothing is spilled


def test_default_schedules_spill_nothing_on_arm():
    for name in ("spmm", "sddmm"):
        kernel = sparsetir.build(PROGRAMS[name].make("float32", "int32"), NEOVERSE)
        text = kernel.source("asm")
        loops = innermost(text)
        assert sum(count(body, "fmla") for body in loops) > 8
        assert not [line for body in loops for line in body if "[sp" in line]
        assert "prfm" in text


@pytest.mark.parametrize("feat", [32, 64, 128, 256])
def test_sums_over_features_spill_nothing_on_arm(feat):
    """As they do by LLVM's model of Neoverse N1."""
    plan = sparsetir.plan("sddmm", A, feat, target=NEOVERSE, threads=1)
    text = plan.kernel.source("asm")
    assert len(re.findall(r"fmla\s+v", text)) >= 28
    assert not re.findall(r"ld[rp]\s+q\d.*\[sp", text)
    if real_machine().architecture == "aarch64":
        x, y = np.random.default_rng(1).random((2, 2000, feat), "float32")
        rows, cols = A.nonzero()
        wanted = np.einsum("ek,ek->e", x[rows], y[cols])
        np.testing.assert_allclose(plan(x, y), wanted, rtol=1e-5)


def test_a_kernel_for_another_architecture_has_text_and_does_not_run():
    other = "x86_64" if real_machine().architecture == "aarch64" else "aarch64"
    target = {"kind": "llvm", "mtriple": f"{other}-linux-gnu"}
    kernel = sparsetir.build(PROGRAMS["spmm"].make("float32", "int32"), target)
    assert kernel.source("asm")
    with pytest.raises(RuntimeError, match=f"it is compiled for {other}, and this machine is "):
        right(kernel)
