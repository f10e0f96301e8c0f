"""SpMM over formats of the library, against scipy, on patterns that are easy to get wrong."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetir
from csr_zoo import ZOO, check_spmm
from pairs import by_turns
from sparsetir.formats import (
    BSR,
    COO,
    CSC,
    CSR,
    DBSR,
    DCSR,
    DIA,
    ELL,
    SELL,
    SRBCRS,
    EnumeratedPatterns,
    Hyb,
    Ragged,
    RowELL,
)
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.templates import decomposed
from sparsetir.schedules.templates.decomposed import Decomposed, refusal
from sparsetir.sparse_ir.errors import ScheduleError
from spmm_gpu_common import MASKS, name_of, on_runners, pattern_of, run_spmm

FORMATS = (
    CSR(), DCSR(), CSC(), COO(), ELL(), Ragged(), DIA(), RowELL(4), BSR(3, 4), DBSR(4, 2),
    SRBCRS(4, 4), SELL(4, 8), Hyb(2, 2), EnumeratedPatterns(3),
)  # fmt: skip


BAND = sp.csr_array(np.tri(19, 26, 2, "float32") - np.tri(19, 26, -3, "float32"))


def check(config, feat, dtype="float32", matrices=ZOO, special=True):
    """Run on all matrices that fit the format; returns the last plan."""
    for matrix in (BAND, *matrices.values()):
        pattern = sparsetir.SparseMatrix(matrix).pattern
        if refusal(config.format, pattern, Spmm(dtype)) is None:
            plan = check_spmm(matrix, config, feat, dtype, special=special)
    return plan


@pytest.mark.parametrize("fmt", by_turns(FORMATS, 3), ids=lambda f: f.name)
@pytest.mark.default("coo", "dia")
def test_default_schedule(fmt):
    """One kernel serves all patterns and features; padding has no effect."""
    before = sparsetir.compilations()
    check(Decomposed(fmt), 5)
    check(Decomposed(fmt), 18)
    assert sparsetir.compilations() - before <= 1


NARROW = [(dtype, fmt) for dtype in ("float16", "bfloat16") for fmt in FORMATS]


@pytest.mark.parametrize(("dtype", "fmt"), by_turns(NARROW, 14), ids=str)
@pytest.mark.default("float16-CSR()")
def test_sums_of_16_bits_are_rounded_once(dtype, fmt):
    """Batches in all formats, in pieces of rows, and over several rules."""
    check(Decomposed(fmt), 29, dtype, special=False)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("fmt", [RowELL(4), ELL(), SRBCRS(4, 4)], ids=str)
def test_terms_that_16_bits_would_lose(fmt, dtype):
    """2048 and more pieces of one, which float16 would stop at."""
    matrix = sp.csr_array(np.ones((1, 5000), "float32"))
    run = check_spmm(matrix, Decomposed(fmt), 16, dtype)
    kind = getattr(torch, dtype)
    out = run(torch.ones(5000, 16, dtype=kind), values=torch.ones(5000, dtype=kind))
    assert (out == torch.tensor(5000.0).to(out.dtype)).all()


def test_too_much_padding_is_refused_before_converting(monkeypatch):
    def convert(*_):
        raise AssertionError

    monkeypatch.setattr(ELL, "convert", convert)
    one_row = sp.csr_array((np.ones(300, "float32"), ([3] * 300, range(300))), shape=(400, 300))
    with pytest.raises(ScheduleError, match=r"ell takes too much room .* 400.0 slots per element"):
        sparsetir.plan("spmm", one_row, 8, config=Decomposed(ELL()))


@pytest.mark.parametrize(
    "fmt, dtype, as_cuda",
    on_runners([(BSR(3, 4), "float32"), (CSC(), "float32"), (Hyb(1, 2), "float16")], (1, 2)),
    ids=name_of,
)
def test_the_default_schedule_of_gpus(fmt, dtype, as_cuda):
    config, problem = Decomposed(fmt), Spmm(dtype)
    for name in ("empty rows", "one dense row"):
        matrix = pattern_of(MASKS[name], "int32")
        run_spmm(problem, config, matrix, 12, as_cuda=as_cuda, template=decomposed)
