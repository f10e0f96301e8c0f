"""Products of blocks on tensor cores, their CUDA text run on a CPU under orders of warps."""

from __future__ import annotations

import numpy as np
import pytest

from cuda_runner import requires_cuda_text
from sparsetir.formats import BSR
from sparsetir.schedules.templates.spmm_tensor_cores import TensorCores
from tensor_cores_common import check, kernel, pattern

pytestmark = requires_cuda_text
COUNTS = [0, 1, 2, 5, 3]  # blocks of a row: none, one, fewer and more than stages


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_rows_of_any_number_of_blocks(stages):
    """Pipelines that have nothing to do, and less than they hold."""
    config = TensorCores(BSR(32, 32), stages=stages, tile=64, warps=(2, 1))
    mask = pattern(config.format, (150, 200), COUNTS)
    found = check(kernel(config), mask, feat=72)
    assert not found[:32].any()  # a row of no blocks


def test_nothing_stored():
    config = TensorCores(BSR(32, 32), tile=64, warps=(2, 1))
    found = check(kernel(config), np.zeros((40, 50), bool), feat=16)
    assert not found.any()
