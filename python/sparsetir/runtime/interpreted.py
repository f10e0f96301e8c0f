"""The interpreter with the calling convention of kernels: sizes follow from shapes of arrays."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from sparsetir.runtime.signature import Signature
from sparsetir.sparse_ir import interpret as core
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.open_axes import refuse_open


@functools.wraps(core.interpret)
def interpret(func: SparseFunc, arguments: Mapping[str, Any] | Sequence[Any]) -> None:  # noqa: D103
    if len(arguments) < len(func.params):
        refuse_open("interpret", func)
        signature = Signature(func)
        if not isinstance(arguments, Mapping):
            arguments = dict(zip(signature.names, arguments, strict=False))
        values = [arguments.get(name) for name in signature.names]
        signature.infer(values)
        sizes = {signature.names[i]: values[i] for i in signature.scalars if values[i] is not None}
        arrays = (i for i in signature.index_arrays if values[i] is not None)
        flat = {signature.names[i]: signature.flat(i, values) for i in arrays}
        arguments = {**sizes, **arguments, **flat}
    core.interpret(func, arguments)
