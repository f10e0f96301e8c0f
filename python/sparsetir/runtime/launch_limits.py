"""Launches within a GPU's limits: host code skips those of no blocks, and refuses too large ones.

TVM passes extents of grids to the driver unchanged. CUDA refuses a grid of no blocks, which a
matrix with rows and no elements leads to, and reads 32 bits of each extent, so that a larger grid
would become a smaller one. Before::

    T.call_ffi_kernel("kernel", A, nnz, (nnz + 15) // 16, 128,
                      launch_params=["blockIdx.x", "threadIdx.x"])

After, with the extents in 64 bits::

    if (int64(nnz) + 15) // 16 > 0:
        if (int64(nnz) + 15) // 16 > 2147483647:
            T.call_packed("sparsetir.refuse_launch", "kernel", "blocks in x", .., 2147483647)
        T.call_ffi_kernel(..)

Numbers of threads and bytes of shared memory that are constants are compared when the function is
compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx

from sparsetir.schedules.passes.shared_addresses import shared_addresses
from sparsetir.schedules.targets import is_gpu
from sparsetir.sparse_ir.nodes import nodes_of
from sparsetir.sparse_ir.tir import BINARY, as_dtype, as_one, dtype_of
from sparsetir.sparse_ir.traversal import map_expr

# The name of :func:`launched_within_limits` among TVM's pipelines.
PIPELINE = "sparsetir"
THREADS = "threads in a block"
DYNAMIC_SHARED = "tirx.use_dyn_shared_memory"
STATIC_SHARED_BYTES = 48 * 1024  # the most that CUDA compiles
# Bytes of shared memory that a block may ask for, by architecture (CUDA's guide, "Compute
# Capabilities"); later ones have at least what sm_120 has.
SHARED_BYTES = {
    70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 88: 99, 89: 99, 90: 227, 100: 227, 101: 227,
    103: 227, 110: 227, 120: 99, 121: 99,
}  # fmt: skip
MOST_BLOCKS = 2**31 - 1  # in every direction of any GPU: kernels number blocks in 32 bits
MOST_CUDA_BLOCKS = {"blockIdx.y": 65535, "blockIdx.z": 65535}
WHAT = {
    **{f"blockIdx.{d}": f"blocks in {d}" for d in "xyz"},
    **{f"threadIdx.{d}": f"threads in {d}" for d in "xyz"},
    DYNAMIC_SHARED: "bytes of shared memory",
}


def limits_of(target: tvm.target.Target) -> dict[str, int]:
    """The maximum of each launch parameter of a target, where known."""
    limits = {f"blockIdx.{d}": MOST_BLOCKS for d in "xyz"}
    known = target.attrs
    if "max_num_threads" in known:
        limits[THREADS] = int(known["max_num_threads"])
    if target.kind.name == "cuda":
        number = int("".join(filter(str.isdigit, str(known.get("arch", "")))) or 80)
        limits |= {**MOST_CUDA_BLOCKS, "threadIdx.z": 64}
        limits[DYNAMIC_SHARED] = SHARED_BYTES.get(number, SHARED_BYTES[120]) * 1024
    elif "max_shared_memory_per_block" in known:
        limits[DYNAMIC_SHARED] = int(known["max_shared_memory_per_block"])
    return limits


def launched_within_limits(mod: tvm.IRModule) -> tvm.IRModule:
    """Split a module into host and device parts, with its launches kept within limits.

    Raises ValueError for constants beyond them: an error of a pass keeps its type only if it is
    Python's own.
    """
    devices = {str(v.name_hint): f for v, f in mod.functions.items() if is_gpu(f.attrs["target"])}
    for var, func in mod.functions.items():
        if var.name_hint in devices:
            mod[var] = shared_addresses(func)
        elif devices:
            mod[var] = func.with_body(_guarded(func.body, devices))
    return mod


def _pipeline() -> tuple[Any, Any, Any]:
    """TVM's pipeline for a target, then :func:`launched_within_limits`."""

    @tvm.transform.module_pass(opt_level=0)
    def lowered(mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        target = next(iter(mod.functions.values())).attrs["target"]
        return launched_within_limits(tirx.get_default_tir_pipeline(target)[0](mod))

    return lowered, *tirx.get_tir_pipeline("s_tir")[1:]


tirx.register_tir_pipeline(PIPELINE, _pipeline)


@tvm_ffi.register_global_func("sparsetir.refuse_launch")
def refuse_launch(kernel: str, what: str, got: int, most: int) -> None:
    """Raise the ValueError of a launch beyond a limit; the host part of functions calls it."""
    raise ValueError(_refusal(kernel, what, got, most))


def _refusal(kernel: str, what: str, got: int, most: int) -> str:
    return f"{kernel}: expected at most {most} {what}, got {got}"


def _guarded(body: Any, devices: Mapping[str, tirx.PrimFunc]) -> Any:
    """The body of a host function with its launches guarded.

    devices : the kernels by name
    """
    bound = {b.var: b.value for b in nodes_of(tirx.Bind, body)}

    def guard(stmt: tirx.Evaluate) -> tirx.Stmt:
        call = stmt.value
        if str(getattr(getattr(call, "op", None), "name", "")) != "tirx.call_ffi_kernel":
            return stmt
        name, tags = str(call.args[0].value), [str(tag) for tag in call.attrs.launch_params]
        args = list(call.args)
        arguments, launch = args[: -len(tags)], dict(zip(tags, args[-len(tags) :], strict=True))
        narrow = [tag for tag, extent in launch.items() if _is_narrow(extent)]
        extents = {tag: _in_64_bits(extent, bound) for tag, extent in launch.items()}
        blocks = [extent for tag, extent in extents.items() if tag.startswith("blockIdx")]
        if any(isinstance(n, tirx.IntImm) and int(n) < 1 for n in blocks):
            return tirx.Evaluate(0)
        call = ir.Call(call.op, [*arguments, *extents.values()], call.attrs, ret_ty=call.ty)
        checks = _checks(name, extents, narrow, devices[name])
        some = [n > as_dtype(0, "int64") for n in blocks if not isinstance(n, tirx.IntImm)]
        steps = as_one([*checks, tirx.Evaluate(call)])
        return tirx.IfThenElse(tirx.all(*some), steps, None) if some else steps

    return map_expr(body, [(tirx.Evaluate, guard)])


def _checks(
    name: str, extents: dict[str, Any], narrow: list[str], kernel: tirx.PrimFunc
) -> list[tirx.Stmt]:
    """Statements that refuse a launch beyond limits.

    narrow : the extents that the program computes in 32 bits

    Raises ValueError if they always would.
    """
    limits = limits_of(kernel.attrs["target"])
    static = _static_shared(kernel)
    threads = [e for tag, e in extents.items() if tag.startswith("threadIdx")]
    if kernel.attrs["target"].kind.name == "cuda" and static > STATIC_SHARED_BYTES:
        refusal = _refusal(name, "bytes of static shared memory", static, STATIC_SHARED_BYTES)
        raise ValueError(f"{refusal}; legal are more in scope 'shared.dyn'")
    compared = dict(extents)
    if all(isinstance(e, tirx.IntImm) for e in threads):
        compared[THREADS] = as_dtype(prod(int(e) for e in threads), "int64")
    if static or DYNAMIC_SHARED in extents:
        compared[DYNAMIC_SHARED] = extents.get(DYNAMIC_SHARED, as_dtype(0, "int64")) + static
    for tag in narrow:
        extent = extents[tag]
        if isinstance(extent, tirx.FloorDiv) and isinstance(extent.b, tirx.IntImm):
            # Blocks of `b` positions each: kernels number all of them in 32 bits.
            compared[f"positions in {tag}"] = extent * extent.b
            limits[f"positions in {tag}"] = MOST_BLOCKS + 1
    checks: list[tirx.Stmt] = []
    for tag, extent in compared.items():
        most, what = limits.get(tag), WHAT.get(tag, tag)
        if most is None:
            continue
        if not isinstance(extent, tirx.IntImm):
            args = ("sparsetir.refuse_launch", name, what, extent, as_dtype(most, "int64"))
            refused = tirx.Evaluate(tirx.call_packed(*args))
            checks.append(tirx.IfThenElse(extent > as_dtype(most, "int64"), refused, None))
        elif int(extent) > most:
            raise ValueError(_refusal(name, what, int(extent), most))
    return checks


def _static_shared(kernel: tirx.PrimFunc) -> int:
    """Bytes of a kernel's arrays in static shared memory."""
    arrays = [a.buffer for a in nodes_of(tirx.AllocBuffer, kernel.body)]
    return sum(
        prod(int(n) for n in array.shape) * ((tvm.DataType(array.dtype).bits + 7) // 8)
        for array in arrays
        if array.scope() == "shared"
    )


def _is_narrow(extent: Any) -> bool:
    return dtype_of(extent) == "int32" and not isinstance(extent, tirx.IntImm)


def _in_64_bits(extent: Any, bound: Mapping[Any, Any]) -> Any:
    """An extent whose intermediate results are of 64 bits, however narrow its sizes are.

    bound : values of variables of the host function, which may be too narrow themselves
    """
    if isinstance(extent, ir.Var) and isinstance(bound.get(extent), BINARY):
        return _in_64_bits(bound[extent], bound)
    if isinstance(extent, BINARY):
        return type(extent)(_in_64_bits(extent.a, bound), _in_64_bits(extent.b, bound))
    if isinstance(extent, tirx.Cast) and dtype_of(extent.value) in ("int32", "int64"):
        return _in_64_bits(extent.value, bound)
    return as_dtype(extent, "int64")
