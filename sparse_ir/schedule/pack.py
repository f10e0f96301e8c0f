"""Store an operand in the order in which an iteration reads it.

Before, after `sell_slices`, where values are gathered::

    C[..] = C[..] + T.Select(.., A[I_slots[s, w, l]] * B[J_slots[s, w, l]], 0.0)

After `pack("A", iteration)`, where values are contiguous::

    T.func_attr({"computed": {"a_packed": {"recipe": "packed", "values": "$a", ...}}})
    A_packed = T.match_sparse_buffer(a_packed, (I_slices, I_steps, I_lanes), "float32")

    C[..] = C[..] + T.Select(.., A_packed[s, w, l] * B[J_slots[s, w, l]], 0.0)

The packed values are a computed parameter that depends on values, not on structure alone: a kernel
computes them in every call, a plan once for the values that it is made with. So it suits constants.
"""

from __future__ import annotations

from typing import Any

from tvm import ir
from tvm_ffi import structural_equal

from sparsetir.sparse_ir.computed import COMPUTED
from sparsetir.sparse_ir.known import known
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    SparseBuffer,
    SparseFunc,
    buffer_var,
    declared,
    iterations_around,
    loads_of,
    same_indices,
    stores_of,
)
from sparsetir.sparse_ir.promises import with_fact
from sparsetir.sparse_ir.recipes.general import packed
from sparsetir.sparse_ir.schedule.loops import SparseIterationRef, change_in, changed
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.traversal import access_rules, map_expr

NAME = "pack"


@primitive
def pack(func: SparseFunc, buffer: str, iteration: SparseIterationRef) -> tuple[SparseFunc, str]:
    """Store values in the order in which an iteration reads them.

    A plan does this once, a kernel in every call.

    Parameters
    ----------
    buffer : str
        Name of a parameter's buffer over one dense axis, which the iteration only reads, and only
        at `TABLE[..]`, an array indexed by coordinates of its axes (visited ones, or by the fact
        "inside") and known to hold positions, such as a recipe's result, or columns.
    iteration : SparseIterationRef
        The iteration whose order it is.

    Returns
    -------
    str
        Name of the buffer with the values in that order.
    """
    change = change_in(NAME, func, iteration)
    it, refuse = change.it, change.refuse
    named = [b for b in func.buffers if b.name == buffer]
    if not named or named[0].handle is None or len(named[0].axes or ()) != 1:
        names = [b.name for b in func.buffers if b.handle is not None and len(b.axes or ()) == 1]
        refuse(f"argument 'buffer': expected a parameter over one axis, {names}, got {buffer!r}")
    values = named[0]
    loads = loads_of(it, values.var)
    written = any(s.buffer.same_as(values.var) for s in stores_of(func.body))
    if not loads or written:
        refuse(f"argument 'buffer': expected '{buffer}' to be read here, and nowhere written")
    at = loads[0].indices[0]
    table = declared(func).buffer_of(at.source) if isinstance(at, ir.TensorLoad) else None
    axes_of = {v: a for x in [*iterations_around(func, it), it] for a, v, _ in x.axis_of()}
    fits = (
        table is not None and table.handle is not None and len(table.axes or ()) == len(at.indices)
    )
    if not fits or not all(same_indices(x.indices, [at]) for x in loads):
        refuse(
            f"expected all reads of '{buffer}' at one table, got {[x.indices[0] for x in loads]}"
        )
    assert table is not None and table.axes is not None and table.handle is not None
    over = [axes_of.get(i) if isinstance(i, ir.Var) else None for i in at.indices]
    inside = {axis for name, axis in known(func).inside if name == table.name}
    trusted = inside == {a.name for a in table.axes}
    if not trusted and [a and a.name for a in over] != [a.name for a in table.axes]:
        refuse(f"expected '{table.name}' at coordinates of its axes, got {list(at.indices)}")
    if not structural_equal(known(func).domains.get(table.var), values.var.ty.shape[0]):
        refuse(f"expected '{table.name}' to be known to hold positions of '{buffer}'")
    name = fresh_name(func, f"{buffer}_packed")
    handle = ir.Var(fresh_name(func, name.lower()), ir.PointerType(ir.PrimType("void")))
    var = buffer_var([a.length for a in table.axes], values.dtype, name)
    how: dict[str, Any] = {
        "recipe": packed.__name__, "values": f"${values.handle.name}",
        "order": f"${table.handle.name}",
    }  # fmt: skip
    computed = {**dict(func.attrs.get(COMPUTED, {}).items()), str(handle.name): how}

    new = var, list(at.indices)
    body = map_expr(it.body, access_rules(lambda b, _: new if b.same_as(values.var) else None))
    change.func = func.with_attr(COMPUTED, computed)
    packed_values = SparseBuffer(var=var, axes=table.axes, handle=handle)
    out = change.put(changed(it, body=body), params=[handle], buffers=[packed_values])
    for axis in inside:
        out = with_fact(out, "inside", buffer=name, axis=axis)
    return out, name
