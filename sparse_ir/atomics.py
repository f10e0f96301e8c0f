"""Atomic updates on a GPU, where several visits may update one element.

An iteration with the annotation "atomic" stores `X[..] = X[..] + term`, or the max or min of the
two. The interpreter, and any serial order, can execute that as written. Before::

    with T.sp_iter([W, L], "SS", "spmm_add") as [w, l]:
        T.sp_iter_attr({"atomic": 1})
        C[i, k] = C[i, k] + C_ws[w, l]

In stage II::

    with T.sblock("spmm_add0"):
        T.call_extern("float32", "atomicAdd", T.address_of(C[vi, vk]), C_ws[vw, vl])

CUDA has integer maxima only. The bits of a nonnegative float, read as an integer, are ordered like
the floats, and those of a negative one, read without sign, in reverse: a maximum of floats is thus
one of two integer operations, selected by the sign of the term (-0.0 counts as negative, and is not
below 0.0 then). A NaN term is dropped, unless `T.Select(term > X or T.isnan(term), term, X)` keeps
it: it then becomes the NaN that is extremal for both operations. A NaN element stays NaN, in any
order of visits. `T.max` itself does not specify NaN: the interpreter takes the second of two
unordered operands, CUDA the one that is not NaN.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.reductions import COMBINES
from sparsetir.sparse_ir.annotations import ATOMIC
from sparsetir.sparse_ir.errors import LoweringError
from sparsetir.sparse_ir.nodes import SparseFunc, SparseIteration, iteration_with, sparse_iterations
from sparsetir.sparse_ir.reduction import Reduction, add_guards, reduction_of, split_guards
from sparsetir.sparse_ir.traversal import map_expr

ATOMIC_DTYPES = {name: combine.atomic for name, combine in COMBINES.items() if combine.atomic}
NAME = "sparsetir_atomic"
# {signed}, {unsigned}: the operations on such integers; {stay}: makes the element NaN for good.
EXTREMUM = """
__device__ __forceinline__ void {name}(float* at, float value) {{
  int* bits = reinterpret_cast<int*>(at);
  unsigned* magnitude = reinterpret_cast<unsigned*>(at);
  if (value != value) {nan}
  const int given = __float_as_int(value);
  const float old = given < 0 ? __uint_as_float({unsigned}(magnitude, (unsigned)given))
                              : __int_as_float({signed}(bits, given));
  if (old != old) {stay};
}}
"""
STAY = {"max": "atomicMax(bits, 0x7fffffff)", "min": "atomicMax(magnitude, 0xffffffffu)"}
OTHER = {"max": "Min", "min": "Max"}
ATOMIC_KINDS = " or ".join(f"a {name} of {', '.join(of)}" for name, of in ATOMIC_DTYPES.items())
UPDATE = f"X[..] = X[..] + term (or max, min), {ATOMIC_KINDS}, without an init"


def has_atomics(operator: str, dtype: str) -> bool:
    """Whether a GPU can reduce atomically, by operator name (:class:`Reduction`) and dtype."""
    return dtype in ATOMIC_DTYPES.get(operator, ())


def with_atomic_calls(func: SparseFunc) -> SparseFunc:
    """The function with atomic updates in place of the stores of atomic iterations.

    Raises LoweringError for an atomic iteration that stores anything but a reduction that has
    atomics.
    """

    atomic = [it for it in sparse_iterations(func) if ATOMIC in it.annotations]
    for it in atomic:
        if atomic_reduction(it) is None:
            raise LoweringError(
                f"sp_iter '{it.name}': annotation '{ATOMIC}': expected {UPDATE}, got another "
                "statement"
            )

    def visit(it: Any) -> Any:
        reduction = atomic_reduction(it) if ATOMIC in it.annotations else None
        if reduction is None:
            return it
        body = add_guards(reduction.conditions, atomic_update(reduction, reduction.term))
        return iteration_with(it, body=body)

    return func.replace(body=map_expr(func.body, [(SparseIteration, visit)])) if atomic else func


def atomic_update(reduction: Reduction, term: Any) -> Any:
    """A store, in the form that :func:`as_call` recognises, that combines a term atomically."""
    store = reduction.store
    how = NAME, reduction.operator, int(reduction.keeps_nan)
    value = tirx.call_extern(str(store.value.ty.dtype), *how, term)
    return tirx.BufferStore(store.buffer, value, store.indices)


def as_call(stmt: Any) -> Any:
    """The call for an atomic update, with the guards for its element if there are any."""
    conditions, store = split_guards(stmt)
    value: Any = getattr(store, "value", None)
    name: Any = value.args[0] if isinstance(value, ir.Call) and value.args else None
    if not isinstance(name, ir.StringImm) or name.value != NAME:
        return stmt
    place = tirx.BufferLoad(store.buffer, store.indices)
    _, operator, keeps_nan, term = value.args
    call = atomic_call(str(operator.value), place, term, bool(keeps_nan))
    return add_guards(conditions, tirx.Evaluate(call))


def atomic_call(operator: str, place: Any, term: Any, keeps_nan: bool = True) -> Any:
    """The call that combines a term into an element; `place` is a load of the element."""
    dtype, arguments = str(place.ty.dtype), [tirx.address_of(place), term]
    if operator == "sum":
        return tirx.call_extern(dtype, "atomicAdd", *arguments)
    if dtype == "int32":
        return tirx.call_extern(dtype, _on_integers(operator), *arguments)
    name = f"{NAME}_{operator}{'_or_nan' if keeps_nan else ''}"
    return tirx.call_intrin(
        "void", "tirx.cuda.func_call", name, *arguments, _source(name, operator, keeps_nan)
    )


def _on_integers(operator: str) -> str:
    return f"atomic{operator.capitalize()}"


def _source(name: str, operator: str, keeps_nan: bool) -> str:
    """A CUDA function for the maximum or minimum of a float in memory and another."""
    stay = STAY[operator]
    return EXTREMUM.format(
        name=name,
        signed=_on_integers(operator),
        unsigned=f"atomic{OTHER[operator]}",
        stay=stay,
        nan=f"{{ {stay}; return; }}" if keeps_nan else "return;",
    )


def atomic_reduction(it: SparseIteration) -> Reduction | None:
    """The reduction of an iteration that does nothing else and has atomics, else None."""
    reduction = reduction_of(it.body)
    dtype = "" if reduction is None else str(reduction.store.value.ty.dtype)
    fits = reduction is not None and it.init is None and has_atomics(reduction.operator, dtype)
    return reduction if fits else None
