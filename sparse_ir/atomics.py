"""Atomic additions on a GPU, where several visits may add to one element.

An iteration with the annotation "atomic" stores `X[..] = X[..] + term`, or max or min of the two,
which the interpreter, and any order of visits, may do as it stands. Before::

    with T.sp_iter([W, L], "SS", "spmm_add") as [w, l]:
        T.sp_iter_attr({"atomic": 1})
        C[i, k] = C[i, k] + C_ws[w, l]

In stage II::

    with T.sblock("spmm_add0"):
        T.call_extern("float32", "atomicAdd", T.address_of(C[vi, vk]), C_ws[vw, vl])

CUDA has the maximum of integers, not of floats. The bits of a float that is not negative, taken as
an integer, are in the order of the floats, and those of a negative one, without a sign, in their
reverse: a maximum of floats is one of these two on integers, by the sign of the term (-0.0 is one
that is negative, and not below 0.0 then). A term that is NaN is left out, or where
`T.Select(term > X or T.isnan(term), term, X)` keeps it becomes the NaN that stays under both; an
element that is NaN stays so, as it does in any order of visits. `T.max` itself says nothing of NaN:
the interpreter takes the second of two that are not in order, CUDA the one that is no NaN.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.reductions import COMBINES
from sparsetir.sparse_ir.annotations import ATOMIC
from sparsetir.sparse_ir.errors import LoweringError
from sparsetir.sparse_ir.nodes import SparseFunc, SparseIteration, iteration_with, sparse_iterations
from sparsetir.sparse_ir.reduction import Reduction, reduction_of, taken_apart, under
from sparsetir.sparse_ir.traversal import map_expr

ATOMIC_DTYPES = {name: combine.atomic for name, combine in COMBINES.items() if combine.atomic}
PREFIX = "sparsetir_atomic_"
NAN = "_or_nan"
# {signed} and {unsigned}: what is done with such integers; {stay}: makes the element NaN for good.
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
    """Whether a GPU can reduce so atomically, by the names of :class:`Reduction`."""
    return dtype in ATOMIC_DTYPES.get(operator, ())


def with_atomic_calls(func: SparseFunc) -> SparseFunc:
    """The function with atomic updates for the stores of atomic iterations.

    Raises LoweringError for an atomic iteration that stores something else than a reduction which
    has atomics.
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
        body = under(reduction.conditions, atomic_update(reduction, reduction.term))
        return iteration_with(it, body=body)

    return func.replace(body=map_expr(func.body, [(SparseIteration, visit)])) if atomic else func


def atomic_update(reduction: Reduction, term: Any) -> Any:
    """A store as :func:`as_call` knows it, which takes in a term."""
    store = reduction.store
    name = f"{PREFIX}{reduction.operator}{NAN if reduction.keeps_nan else ''}"
    value = tirx.call_extern(str(store.value.ty.dtype), name, term)
    return tirx.BufferStore(store.buffer, value, store.indices)


def as_call(stmt: Any) -> Any:
    """The call for an atomic update, which may be under the conditions that its element exists."""
    conditions, store = taken_apart(stmt)
    value: Any = getattr(store, "value", None)
    name = _name(value) if isinstance(store, tirx.BufferStore) else ""
    if not name:
        return stmt
    place = tirx.BufferLoad(store.buffer, store.indices)
    operator = name.removeprefix(PREFIX).removesuffix(NAN)
    call = atomic_call(operator, place, value.args[1], name.endswith(NAN))
    return under(conditions, tirx.Evaluate(call))


def atomic_call(operator: str, place: Any, term: Any, keeps_nan: bool = True) -> Any:
    """The call that takes a term into an element, a load of which is `place`."""
    dtype, arguments = str(place.ty.dtype), [tirx.address_of(place), term]
    if operator == "sum":
        return tirx.call_extern(dtype, "atomicAdd", *arguments)
    if dtype == "int32":
        return tirx.call_extern(dtype, _on_integers(operator), *arguments)
    name = f"{PREFIX}{operator}{NAN if keeps_nan else ''}"
    return tirx.call_intrin(
        "void", "tirx.cuda.func_call", name, *arguments, _source(name, operator)
    )


def _on_integers(operator: str) -> str:
    return f"atomic{operator.capitalize()}"


def _source(name: str, operator: str) -> str:
    """A function of CUDA for the maximum or minimum of a float in memory and another."""
    stay = STAY[operator]
    return EXTREMUM.format(
        name=name,
        signed=_on_integers(operator),
        unsigned=f"atomic{OTHER[operator]}",
        stay=stay,
        nan=f"{{ {stay}; return; }}" if name.endswith(NAN) else "return;",
    )


def _name(value: Any) -> str:
    """The name of what :func:`atomic_update` makes, else an empty one."""
    name: Any = value.args[0] if isinstance(value, ir.Call) and len(value.args) == 2 else None
    text = str(name.value) if isinstance(name, ir.StringImm) else ""
    return text if text.startswith(PREFIX) else ""


def atomic_reduction(it: SparseIteration) -> Reduction | None:
    """The reduction of an iteration that does nothing else and has atomics; else None."""
    reduction = reduction_of(it.body)
    dtype = "" if reduction is None else str(reduction.store.value.ty.dtype)
    fits = reduction is not None and it.init is None and has_atomics(reduction.operator, dtype)
    return reduction if fits else None
