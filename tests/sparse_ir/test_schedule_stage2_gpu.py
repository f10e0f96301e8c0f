"""Threads on stage II, run as OpenCL on the CPU; see `stage2.py`."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportMissingModuleSource=false

import pytest

from cuda_runner import requires_cuda_text
from gpu_runner import requires_opencl
from pairs import by_turns
from programs import PROGRAMS
from sparsetir import LoweringError, lower_sparse_buffer
from stage2 import check, run_gpu, run_gpu_as_cuda, schedule, stage_two_steps, stage_two_table

ROW = 's.bind(rows, "blockIdx.x"); s.reorder(k, j); _, x = s.split(k, [None, 4])'
BLOCKS = 's.bind(rows, "blockIdx.x"); s.reorder(k, j); s.bind(k, "blockIdx.y")'
LOCAL = f'{ROW}; s.reverse_compute_at(s.cache_write(b, 0, "local"), x); s.bind(x, "threadIdx.x")'
REDUCED = f'{BLOCKS}; s.bind(s.split(j, [None, 8])[1], "threadIdx.x")'
# As in test_schedule_stage2.py. TVM's compute_at of what rfactor makes drops the bound of a partial
# tile, which the lowering puts back; and the last block of nonzeros is partial: a bound that
# differs between threads of a block must not lie around a reduction over threads.
GPU = f"""
[spmm: j k]
{ROW}; s.bind(x, "threadIdx.x")
outer, inner = s.split(rows, [None, 4]); s.bind(outer, "blockIdx.x"); s.bind(inner, "threadIdx.y")\
; s.reorder(k, j); x, y = s.split(k, [None, 4]); s.bind(x, "blockIdx.y"); s.bind(y, "threadIdx.x")
s.bind(rows, "blockIdx.x"); s.bind(s.split(k, [None, 4])[1], "threadIdx.x")
{ROW}; s.bind(x, "threadIdx.x"); s.decompose_reduction(b, j)
{LOCAL}
{LOCAL}; s.decompose_reduction(b, j)
{LOCAL}; s.compute_at(s.cache_read(b, "B", "local"), j)
{ROW}; s.bind(x, "threadIdx.x"); s.compute_at(s.cache_read(b, "J_indices", "local"), j)
{REDUCED}
{ROW}; s.bind(x, "threadIdx.y"); s.bind(s.split(j, [None, 8])[1], "threadIdx.x")
{BLOCKS}; _, x = s.split(j, [None, 8]); s.reverse_compute_at(s.cache_write(b, 0, "local"), k)\
; s.bind(x, "threadIdx.x")
s.bind(rows, "blockIdx.x"); s.reorder(k, j); f = s.rfactor(s.split(j, [None, 8])[1], 0)\
; k, x = s.get_loops(b); s.bind(x, "threadIdx.x"); s.compute_at(f, k)\
; s.bind(s.get_loops(f)[-2], "threadIdx.x"); s.set_scope(f, 0, "local")
[sddmm: j k]
s.bind(rows, "blockIdx.x"); s.bind(s.split(k, [None, 4])[1], "threadIdx.x")
[sddmm_fused: k]
s.bind(s.split(rows, [None, 8])[0], "blockIdx.x"); s.bind(s.split(k, [None, 4])[1], "threadIdx.x")
x, y = s.split(rows, [None, 8]); s.bind(x, "blockIdx.x"); s.bind(y, "threadIdx.x")
[row_softmax: i]
x, y = s.split(i, [None, 8]); s.bind(x, "blockIdx.x"); s.bind(y, "threadIdx.x")\
; [s.set_scope(block(x), 0, "local") for x in ("top0", "total0")]
x, y = s.split(i, [None, 8]); s.bind(x, "blockIdx.x"); s.bind(y, "threadIdx.x")
"""
TABLE = stage_two_table(GPU)


@requires_opencl
@pytest.mark.parametrize(("program", "names", "code"), by_turns(TABLE, 2))
def test_gpu(program, names, code):
    steps = stage_two_steps(program, names, code)
    check(program, schedule(PROGRAMS[program].make("float32", "int32"), steps), run_gpu)


@pytest.mark.slow
@requires_cuda_text
@pytest.mark.parametrize(("program", "names", "code"), TABLE)
def test_gpu_as_cuda(program, names, code):
    steps = stage_two_steps(program, names, code)
    check(program, schedule(PROGRAMS[program].make("float32", "int32"), steps), run_gpu_as_cuda)


def test_decomposed_reduction_over_threads_is_refused():
    """TVM would let the threads race for the output."""
    code = f"{REDUCED}; s.decompose_reduction(b, s.get_loops(b)[1])"
    steps = stage_two_steps("spmm", ["j", "k"], code)
    sch = schedule(PROGRAMS["spmm"].make("float32", "int32"), steps)
    with pytest.raises(
        LoweringError, match="'spmm1_update': its reduction is bound to threadIdx.x"
    ):
        lower_sparse_buffer(sch)
