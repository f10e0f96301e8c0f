"""Backward graphs under torch's older vmap: vectorised Jacobians, `is_grads_batched`.

Its batched tensors have no memory. For an operator without a batching rule torch makes a call per
tensor in the batch; so the whole graph becomes one operator.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from sparsetir.graph.rest import Run
from sparsetir.ops.registry import LIBRARY, is_batched

_number = itertools.count()
_calls: dict[int, Callable[[tuple[Tensor, ...]], list[Tensor]]] = {}


def one_by_one(graph: fx.GraphModule, run: Run) -> Run:
    """Wrap the runner of a graph so that it is called once per tensor in a batch."""
    (output,) = graph.graph.find_nodes(op="output")
    results = [isinstance(x, fx.Node) for x in output.args[0]]

    def each(args: list[Any]) -> Any:
        if not is_batched() or not any(results):
            return run(args)
        arguments = list(args)
        args.clear()
        tensors = [n for n, x in enumerate(arguments) if isinstance(x, Tensor)]

        def call(values: tuple[Tensor, ...]) -> list[Tensor]:
            passed = list(arguments)
            for n, value in zip(tensors, values, strict=True):
                passed[n] = value
            return [x for x, is_result in zip(run(passed), results, strict=True) if is_result]

        _calls[number := next(_number)] = call
        try:
            operator = _operator(len(tensors), sum(results))
            values = iter(operator(number, *(arguments[n] for n in tensors)))
        finally:
            del _calls[number]
        return [next(values) if is_result else None for is_result in results]

    return each


@cache
def _operator(arguments: int, results: int) -> Callable[..., Any]:
    """A torch operator that runs a call, by its number, on `arguments` tensors."""
    name = f"graph_{arguments}_{results}"
    # Separate tensors, as torch does not unbatch lists of them.
    LIBRARY.define(
        f"{name}(int call, {', '.join(f'Tensor x{n}' for n in range(arguments))})"
        f" -> ({', '.join(['Tensor'] * results)})"
    )

    def run(call: int, *values: Tensor) -> Any:
        outputs = _calls[call](values)
        return tuple(outputs) if results > 1 else outputs[0]

    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    operator = getattr(torch.ops.sparsetir, name)
    return operator.default if results > 1 else lambda *args: (operator.default(*args),)
