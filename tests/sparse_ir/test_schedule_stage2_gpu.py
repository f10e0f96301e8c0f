"""Threads on stage II, run as OpenCL on the CPU; see `stage2.py`."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportMissingModuleSource=false

import pytest
import tvm

from cuda_runner import requires_cuda_text
from gpu_runner import cuda_source, requires_opencl
from pairs import by_turns
from programs import PROGRAMS
from sparsetir import LoweringError, lower_sparse_buffer
from stage2 import check, loops, on, run_gpu, run_gpu_as_cuda, schedule

GPU = []


@on(GPU, "spmm")
def row_per_block(s, b, j, k):
    s.bind(*loops(s, "spmm0"), "blockIdx.x")
    s.reorder(k, j)
    _, inner = s.split(k, [None, 4])
    s.bind(inner, "threadIdx.x")


@on(GPU, "spmm")
def rows_and_features_over_threads(s, b, j, k):
    outer, inner = s.split(*loops(s, "spmm0"), [None, 4])
    s.bind(outer, "blockIdx.x")
    s.bind(inner, "threadIdx.y")
    s.reorder(k, j)
    outer, inner = s.split(k, [None, 4])
    s.bind(outer, "blockIdx.y")
    s.bind(inner, "threadIdx.x")


@on(GPU, "spmm")
def threads_inside_the_reduction(s, b, j, k):
    s.bind(*loops(s, "spmm0"), "blockIdx.x")
    _, inner = s.split(k, [None, 4])
    s.bind(inner, "threadIdx.x")


@on(GPU, "spmm")
def decompose_after_bind(s, b, j, k):
    row_per_block(s, b, j, k)
    s.decompose_reduction(b, j)


@on(GPU, "spmm")
def cache_write_local(s, b, j, k):
    s.reorder(k, j)
    _, inner = s.split(k, [None, 4])
    s.reverse_compute_at(s.cache_write(b, 0, "local"), inner)
    s.bind(*loops(s, "spmm0"), "blockIdx.x")
    s.bind(inner, "threadIdx.x")


@on(GPU, "spmm")
def cache_write_local_and_decompose(s, b, j, k):
    cache_write_local(s, b, j, k)
    s.decompose_reduction(b, j)


@on(GPU, "spmm")
def cache_read_gathered_local(s, b, j, k):
    cache_write_local(s, b, j, k)
    s.compute_at(s.cache_read(b, "B", "local"), j)


@on(GPU, "spmm")
def cache_read_index_local(s, b, j, k):
    row_per_block(s, b, j, k)
    s.compute_at(s.cache_read(b, "J_indices", "local"), j)


@on(GPU, "spmm")
def reduce_over_threads(s, b, j, k):
    s.bind(*loops(s, "spmm0"), "blockIdx.x")
    s.reorder(k, j)
    s.bind(k, "blockIdx.y")
    _, inner = s.split(j, [None, 8])
    s.bind(inner, "threadIdx.x")


@on(GPU, "spmm")
def reduce_over_threads_beside_features(s, b, j, k):
    s.bind(*loops(s, "spmm0"), "blockIdx.x")
    s.reorder(k, j)
    _, inner = s.split(k, [None, 4])
    s.bind(inner, "threadIdx.y")
    _, inner = s.split(j, [None, 8])
    s.bind(inner, "threadIdx.x")


@on(GPU, "spmm")
def reduce_over_threads_into_a_cache(s, b, j, k):
    s.bind(*loops(s, "spmm0"), "blockIdx.x")
    s.reorder(k, j)
    s.bind(k, "blockIdx.y")
    _, inner = s.split(j, [None, 8])
    s.reverse_compute_at(s.cache_write(b, 0, "local"), k)
    s.bind(inner, "threadIdx.x")


@on(GPU, "spmm")
def rfactor_over_threads(s, b, j, k):
    # TVM's compute_at drops the bound of the partial tile; the lowering puts it back.
    s.bind(*loops(s, "spmm0"), "blockIdx.x")
    s.reorder(k, j)
    _, inner = s.split(j, [None, 8])
    factored = s.rfactor(inner, 0)
    k, inner = s.get_loops(b)
    s.bind(inner, "threadIdx.x")
    s.compute_at(factored, k)
    s.bind(s.get_loops(factored)[-2], "threadIdx.x")
    s.set_scope(factored, 0, "local")


@on(GPU, "sddmm")
def features_over_threads(s, b, j, k):
    s.bind(*loops(s, "sddmm0"), "blockIdx.x")
    _, inner = s.split(k, [None, 4])
    s.bind(inner, "threadIdx.x")


@on(GPU, "sddmm_fused")
def nonzeros_over_blocks(s, b, k):
    # Blocks hold equally many non-zeros. Their last one is partial: a bound that differs between
    # the threads of a block must not lie around a reduction over threads.
    outer, _ = s.split(*loops(s, "sddmm0"), [None, 8])
    s.bind(outer, "blockIdx.x")
    _, inner = s.split(k, [None, 4])
    s.bind(inner, "threadIdx.x")


@on(GPU, "sddmm_fused")
def nonzeros_over_threads(s, b, k):
    outer, inner = s.split(*loops(s, "sddmm0"), [None, 8])
    s.bind(outer, "blockIdx.x")
    s.bind(inner, "threadIdx.x")


@on(GPU, "row_softmax")
def row_per_thread(s, b, i):
    outer, inner = s.split(i, [None, 8])
    s.bind(outer, "blockIdx.x")
    s.bind(inner, "threadIdx.x")
    for block in ("top0", "total0"):
        s.set_scope(s.get_sblock(block), 0, "local")


@on(GPU, "row_softmax")
def row_per_thread_with_temporaries_in_memory(s, b, i):
    outer, inner = s.split(i, [None, 8])
    s.bind(outer, "blockIdx.x")
    s.bind(inner, "threadIdx.x")


@requires_opencl
@pytest.mark.parametrize("program, steps", by_turns(GPU, 2))
def test_gpu(program, steps):
    check(program, schedule(PROGRAMS[program].make("float32", "int32"), steps), run_gpu)


@pytest.mark.slow
@requires_cuda_text
@pytest.mark.parametrize("program, steps", GPU)
def test_gpu_as_cuda(program, steps):
    check(program, schedule(PROGRAMS[program].make("float32", "int32"), steps), run_gpu_as_cuda)


def test_decomposed_reduction_over_threads_is_refused():
    """TVM would let the threads race for the output."""

    def steps(sch):
        block = sch.get_sblock("spmm1")
        reduce_over_threads(sch, block, *sch.get_loops(block))
        sch.decompose_reduction(block, sch.get_loops(block)[1])

    sch = schedule(PROGRAMS["spmm"].make("float32", "int32"), steps)
    with pytest.raises(
        LoweringError, match="'spmm1_update': its reduction is bound to threadIdx.x"
    ):
        lower_sparse_buffer(sch)


def test_threads_need_a_constant_number():
    """Known TVM limit: split a reduction over a row before its part goes over threads."""

    def steps(sch):
        sch.bind(*loops(sch, "spmm0"), "blockIdx.x")
        j, k = loops(sch, "spmm1")
        sch.reorder(k, j)
        sch.bind(j, "threadIdx.x")

    sch = schedule(PROGRAMS["spmm"].make("float32", "int32"), steps)
    with pytest.raises(tvm.error.InternalError, match="Need constant extent for reduce set"):
        cuda_source(lower_sparse_buffer(sch))
