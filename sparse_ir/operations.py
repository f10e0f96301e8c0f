"""The operations allowed in bodies, by operand type, for the verifier.

Those that TVM lacks on some target are rewritten by `schedules/passes/supported_operations.py`.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx
from tvm.tirx.script import builder as tir_builder

from sparsetir.sparse_ir.nodes import nodes_of
from sparsetir.sparse_ir.verify_sites import Site, Texts

OF_FLOATS = frozenset(
    "exp exp2 exp10 erf tanh sigmoid log log2 log10 log1p tan cos cosh acos acosh sin sinh asin "
    "asinh atan atanh sqrt rsqrt atan2 hypot copysign nextafter ldexp fma fmod".split()
)
OF_INTEGERS = frozenset(("popcount", "clz"))
# Operations of quantised networks and of pointers.
OTHERS = frozenset(("q_multiply_shift", "q_multiply_shift_per_axis", "dp4a", "isnullptr"))
OF_NUMBERS = (tirx.Sub, tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)


def operation_problems(site: Site) -> Texts:
    """The verifier's rule: operations have operands of supported types."""
    for call in nodes_of(ir.Call, *site.expressions):
        name = str(getattr(call.op, "name", "")).rpartition(".")[2]
        if name in OTHERS:
            yield f"T.{name} is no operation of the language: {call}"
        if name not in OF_FLOATS | OF_INTEGERS:
            continue
        dtype = _dtype(call.args[0])
        known = dtype.startswith(("float", "bfloat") if name in OF_FLOATS else ("int", "uint"))
        kind = "a float" if name in OF_FLOATS else "an integer"
        if name == "nextafter" and known and dtype not in ("float32", "float64"):
            known, kind = False, "float32 or float64"
        if not known:
            hint = f', such as T.cast(.., "{"float32" if name in OF_FLOATS else "int32"}")'
            yield f"T.{name}: expected {kind}{hint}, got {dtype}: {call}"
    types = [x.ty.dtype for x in nodes_of(tirx.Cast, *site.expressions)]
    if isinstance(site.stmt, tirx.AllocBuffer):
        types.append(site.stmt.buffer.ty.dtype)
    for dtype in types:
        if not hasattr(tir_builder, str(dtype)):
            yield f"unknown dtype '{dtype}'"
    for x in nodes_of(OF_NUMBERS, *site.expressions):
        whole = isinstance(x, tirx.FloorDiv | tirx.FloorMod)
        if _dtype(x) == "bool" or (whole and not _dtype(x).startswith(("int", "uint"))):
            kind = "integers" if whole else 'numbers, such as T.cast(.., "int32")'
            yield f"expected {kind}, got {_dtype(x)}: {x}"


def _dtype(x: Any) -> str:
    return str(getattr(x.ty, "dtype", "handle")).partition("x")[0]
