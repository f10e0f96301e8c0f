"""What CUDA text becomes for a compiler of C++."""

import pytest

from cuda_text import to_cpp


def body(line: str) -> str:
    """The line as C++."""
    text, _ = to_cpp(line, 90)
    return text.split("\n", 2)[2].strip()


def test_shared_arrays():
    assert body("__shared__ alignas(64) half A[8];\n__shared__ signed char B[3];") == (
        'half (&A)[8] = *(half (*)[8])cuda_shared(0, "A", sizeof(half[8]), sizeof(half));\n'
        "signed char (&B)[3] = *(signed char (*)[3])"
        'cuda_shared(1, "B", sizeof(signed char[3]), sizeof(signed char));'
    )
    dynamic = "extern __shared__ __align__(64) uchar buf[];"
    assert body(dynamic) == "uchar* buf = (uchar*)cuda_dynamic_shared();"
    with pytest.raises(ValueError, match=r"'source': expected shared arrays, got '__shared__ T x;"):
        body("__shared__ T x;")


def test_ptx():
    text = """__asm__ __volatile__(
      "mma.sync.f32"
      "{%0, %1}, {%2};\\n"
      :  "=f"(((float *)(C + f(1, 2)))[0]), "=f"(C[1])
      : "r"(a ? "x:y" : b));"""
    assert body(text) == 'ptx_mma_sync_f32(((float *)(C + f(1, 2)))[0], C[1], a ? "x:y" : b);'
    assert body('asm volatile("cp.async.wait_group 1;" :  :  : "memory");') == (
        "ptx_cp_async_wait_group<1>();"
    )
    copy = 'asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], %2;" :: "r"(a), "n"(16));'
    assert body(copy) == "ptx_cp_async_cg_shared_global(a, 16);"
    with pytest.raises(ValueError, match="expected PTX of one statement, got '{ .reg .pred p; }'"):
        body('asm volatile("{ .reg .pred p; }" ::);')
    with pytest.raises(ValueError, match="expected an operand, got 'a'"):
        body('asm volatile("x.y %0;" : a);')


def test_kernels_and_includes():
    text, names = to_cpp(
        "#include <mma.h>\n"
        'extern "C" __global__ void __launch_bounds__(16, 32) k(float* __restrict__ A, int n) {\n}',
        80,
    )
    assert names == ["k"] and "<mma.h>" not in text
    assert text.startswith('#define __CUDA_ARCH__ 800\n#include "device.h"\n')
    call = 'extern "C" CUDA_QUIET void cuda_call_k(void** a) { k(*(float**)a[0], *(int*)a[1]); }\n'
    assert text.endswith(call)
    assert '"tensor_cores.h"' in to_cpp("nvcuda::wmma::fragment<> f;", 90)[0]
