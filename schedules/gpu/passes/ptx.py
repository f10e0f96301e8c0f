"""Instructions of NVIDIA GPUs that move and multiply tiles, as statements of TIR.

All require sm_80 or later: asynchronous copies to shared memory (`cp.async`), loads of 8 by 8
matrices from there (`ldmatrix`), and products of tiles by the 32 threads of a warp
(`mma`). Products by the 128 threads of a warpgroup, of matrices in shared memory (`wgmma`), require
sm_90a.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from tvm import tirx
from tvm.backend.cuda.op import cuda_func_call

COPY_BYTES = (16, 8, 4)  # the sizes of one `cp.async`


class Product(NamedTuple):
    """An instruction `mma.sync`: products of 16 rows by 8 columns, summed over `depth`.

    sums : the type of the sums
    """

    depth: int
    sums: str
    mnemonic: str


# Instructions by the type of both factors.
PRODUCTS = {
    "float16": Product(16, "float32", "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"),
    "bfloat16": Product(16, "float32", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"),
    "int8": Product(32, "int32", "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"),
}


@cache
def _instructions() -> Any:
    from tvm.backend.cuda.ptx import TABLE, PTXNamespace

    return PTXNamespace(TABLE)


def _instruction(mnemonic: str, *operands: Any) -> Any:
    return tirx.Evaluate(_instructions()[mnemonic](*operands))


def multiply(dtype: str, sums: Sequence[Any], left: Sequence[Any], right: Sequence[Any]) -> Any:
    """Add a product of tiles to sums: 4 registers per thread, and 4 and 2 of the factors.

    dtype : type of the factors, a key of :data:`PRODUCTS`
    sums : elements of a local buffer; left, right : uint32. For their layout see
        :mod:`sparsetir.schedules.gpu.passes.fragments`
    """
    return _instruction(PRODUCTS[dtype].mnemonic, *sums, *left, *right, *sums)


def load_matrices(registers: Sequence[Any], row: Any, transposed: bool) -> Any:
    """Load one, two or four matrices of 8 rows of 16 bytes from shared memory.

    registers : one uint32 element of a local buffer per matrix
    row : the first element of a row; thread 8 n + r gives row r of matrix n
    transposed : whether each thread gets two 16-bit numbers of a column
    """
    how = ".trans" if transposed else ""
    mnemonic = f"ldmatrix.sync.aligned.m8n8.x{len(registers)}{how}.shared.b16"
    return _instruction(mnemonic, *registers, tirx.address_of(row))


def pack(dtype: str, register: Any, low: Any, high: Any) -> Any:
    """Round two float32 numbers to float16 or bfloat16, side by side in one uint32 register."""
    half = {"float16": "f16x2", "bfloat16": "bf16x2"}[dtype]
    return _instruction(f"cvt.rn.{half}.f32", register, high, low)


def copy_async(to: Any, source: Any, size: int, condition: Any = None) -> Any:
    """Copy 4, 8 or 16 bytes to shared memory; write zeros and read nothing if a condition fails.

    to, source : the first elements
    """
    cache_at = "cg" if size == 16 else "ca"
    count = [tirx.IntImm("int32", size)]
    if condition is not None:
        some, none = (tirx.const(n, "uint32") for n in (size, 0))
        count.append(tirx.Select(condition, some, none))
    addresses = tirx.address_of(to), tirx.address_of(source)
    return _instruction(f"cp.async.{cache_at}.shared.global", *addresses, *count)


def exponential(power: Any) -> Any:
    """`exp` of a float32 expression, by the instruction for powers of 2; below 2**-126 it is zero.

    For the exponential of a difference, which is at most 1 in a softmax, the factor log2(e) costs
    nothing. CUDA's `expf` takes ten instructions to be right to the last bits of large powers.
    """
    scale = tirx.const(math.log2(math.e), "float32")
    if isinstance(power, tirx.Sub):
        power = tirx.call_pure_extern("float32", "fmaf", power.a, scale, power.b * -scale)
    else:
        power = power * scale
    name = "sparsetir_exp2"
    source = f"""__forceinline__ __device__ float {name}(float x) {{
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}}"""
    return cuda_func_call(name, power, source_code=source, return_type="float32")


def matrix_descriptor(first: Any, lead: int, stride: int) -> Any:
    """A matrix in shared memory for `wgmma`, in the layout of 128-byte swizzles.

    first : its first element; lead, stride : bytes between its patterns, see
        :mod:`sparsetir.schedules.gpu.passes.warpgroup_program`
    """
    name = "sparsetir_matrix"
    source = f"""
__forceinline__ __device__ unsigned long long {name}(const void* first, int lead, int stride) {{
  unsigned long long at = __cvta_generic_to_shared(first);
  return 1ull << 62 | (unsigned long long)(stride >> 4) << 32 | lead >> 4 << 16 | at >> 4;
}}
"""
    offsets = tirx.IntImm("int32", lead), tirx.IntImm("int32", stride)
    where = tirx.address_of(first)
    return cuda_func_call(name, where, *offsets, source_code=source, return_type="uint64")


def warpgroup_product(
    dtype: str, sums: Sequence[Any], left: Sequence[Any], right: Any, turned: Sequence[bool],
    adds: Any,
) -> Any:  # fmt: skip
    """Start a product of a warpgroup: 64 rows by 16 terms by twice as many columns as sums.

    sums : elements of a local buffer; left : 4 of uint32, or a descriptor; right : a descriptor
    turned : whether neighbours in memory are not along the sum, of each factor in shared memory
    adds : a condition, or the sums are overwritten
    """
    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    mnemonic = f"wgmma.mma_async.sync.aligned.m64n{2 * len(sums)}k16.f32.{kind}.{kind}"
    return _instruction(mnemonic, *sums, *left, right, adds, 1, 1, *map(int, turned))


def in_order(sums: Any, products: Any) -> Any:
    """Products after all that a thread did to registers, and the wait for them.

    sums : the local buffer, whose reads and writes the compiler must not move past either
    products : a statement of :func:`warpgroup_product`
    """
    count = int(sums.ty.shape[0])
    name = f"sparsetir_settled_{count}"
    source = f"""
__forceinline__ __device__ void {name}(float* sums) {{
  #pragma unroll
  for (int i = 0; i < {count}; ++i) asm volatile("" : "+f"(sums[i]) :: "memory");
}}
"""
    first = tirx.address_of(tirx.BufferLoad(sums, [0]))
    settled = tirx.Evaluate(cuda_func_call(name, first, source_code=source))
    fence, commit = (_instruction(f"wgmma.{how}.sync.aligned") for how in ("fence", "commit_group"))
    wait = _instruction("wgmma.wait_group.sync.aligned", 0)
    return tirx.SeqStmt([settled, fence, products, commit, wait, settled])


def show_copies() -> Any:
    """Let `wgmma` see what a thread has written to shared memory."""
    return _instruction("fence.proxy.async.shared::cta")


def commit_copies() -> Any:
    """Commit the copies that a thread has started since the last commit as a group."""
    return _instruction("cp.async.commit_group")


def wait_for_copies(open_groups: int) -> Any:
    """Wait for a thread's copies, except for its latest `open_groups` groups."""
    return _instruction("cp.async.wait_group", open_groups)
