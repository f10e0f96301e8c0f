"""The schedules of Senanayake's thesis for GPUs (appendix A), as CUDA text on the CPU."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import numpy as np
import pytest

from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from pairs import by_turns
from test_thesis import imported, inputs, sizes

gpu = imported("thesis_gpu_schedules")
COLUMNS = {"spmm": 128}
KINDS = [("float32", "int32"), ("float64", "int64")]
SCHEDULES = {name: (program, schedule) for name, program, schedule in gpu.GPU_SCHEDULES}


@requires_cuda_text
@pytest.mark.parametrize(
    ("name", "dtype", "idtype"),
    by_turns(
        [(n, *kind) for at, n in enumerate(SCHEDULES) for kind in KINDS[:: 1 - at % 2 * 2]], 2
    ),
)
def test_schedule(name, dtype, idtype):
    """Against exact results, with empty rows and sizes that divide nothing."""
    program, schedule = SCHEDULES[name]
    args, result, exact, _ = inputs.problem(
        program.__name__, 0.01, dtype, idtype, columns=COLUMNS.get(program.__name__, 37)
    )
    kernel = CudaStages(program(dtype, idtype), schedule)
    found = kernel({**args, **sizes(args)})[result]
    tolerance = 1e-4 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(found, exact, rtol=tolerance, atol=tolerance)
