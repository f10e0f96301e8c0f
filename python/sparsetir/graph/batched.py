"""Backward graphs under torch's older vmap: vectorised Jacobians, `is_grads_batched`.

Its tensors stand for many and have no memory. Of an operator without a rule for them torch makes a
call for each; so one operator is the whole graph.
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
    """The runner of a graph, which is called once for each tensor that one stands for."""
    (output,) = graph.graph.find_nodes(op="output")
    results = [isinstance(x, fx.Node) for x in output.args[0]]

    def each(args: list[Any]) -> Any:
        if not is_batched() or not any(results):
            return run(args)
        given = list(args)
        args.clear()
        tensors = [n for n, x in enumerate(given) if isinstance(x, Tensor)]

        def call(values: tuple[Tensor, ...]) -> list[Tensor]:
            taken = list(given)
            for n, value in zip(tensors, values, strict=True):
                taken[n] = value
            return [x for x, is_result in zip(run(taken), results, strict=True) if is_result]

        _calls[number := next(_number)] = call
        try:
            operator = _operator(len(tensors), sum(results))
            values = iter(operator(number, *(given[n] for n in tensors)))
        finally:
            del _calls[number]
        return [next(values) if is_result else None for is_result in results]

    return each


@cache
def _operator(arguments: int, results: int) -> Callable[..., Any]:
    """An operator of torch's that runs a call, by its number, on so many tensors."""
    name = f"graph_{arguments}_{results}"
    # Lists of tensors torch does not take apart.
    LIBRARY.define(
        f"{name}(int call, {', '.join(f'Tensor x{n}' for n in range(arguments))})"
        f" -> ({', '.join(['Tensor'] * results)})"
    )

    def run(call: int, *values: Tensor) -> Any:
        found = _calls[call](values)
        return tuple(found) if results > 1 else found[0]

    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    operator = getattr(torch.ops.sparsetir, name)
    return operator.default if results > 1 else lambda *args: (operator.default(*args),)
