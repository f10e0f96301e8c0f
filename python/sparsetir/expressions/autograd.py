"""Expressions of torch tensors, with gradients of any order from derived programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from sparsetir.expressions.unit import GRAD, Bound
from sparsetir.formats.pattern import Pattern


class Run(torch.autograd.Function):
    """A bound unit, whose gradients are bound units."""

    @staticmethod
    def forward(
        ctx: Any, bound: Bound, patterns: Mapping[str, Pattern], skipped: bool, *values: Any
    ) -> Any:
        ctx.bound, ctx.patterns = bound, patterns
        ctx.save_for_backward(*values)
        result = bound.empty(True)
        return result if skipped else bound([x.detach() for x in values], result)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        bound, patterns, values = ctx.bound, ctx.patterns, ctx.saved_tensors
        unit, (grad,) = bound.unit, grads
        inputs = dict(zip(unit.inputs, values, strict=True))
        out: list[Any] = []
        for param, wanted in zip(unit.inputs, ctx.needs_input_grad[3:], strict=True):
            out.append(_gradient(bound, patterns, param, inputs, grad) if wanted else None)
        return None, None, None, *out


class Known(torch.autograd.Function):
    """A computed result, whose gradients are those of a function of the same values.

    The function is called for gradients alone, and may leave its result unwritten.
    """

    @staticmethod
    def forward(ctx: Any, result: Any, function: Callable[..., Any], *values: Any) -> Any:
        ctx.function = function
        ctx.save_for_backward(*values)
        return result.detach()  # as a given tensor it would be a view

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wanted = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            # Views, as one tensor may stand for several operands.
            values = [x.view_as(x) for x in ctx.saved_tensors]
            result = ctx.function(values)
        inputs = [x for x, needed in zip(values, wanted, strict=True) if needed]
        create_graph = torch.is_grad_enabled()
        computed = iter(
            torch.autograd.grad(result, inputs, grads, create_graph=create_graph, allow_unused=True)
        )
        return None, None, *(next(computed) if needed else None for needed in wanted)


def _gradient(
    bound: Bound, patterns: Mapping[str, Pattern], param: str, inputs: Mapping[str, Any], grad: Any
) -> Any:
    """The gradient for one input, in the order of its levels."""
    try:
        derived = bound.gradient(param, patterns)
    except ValueError as error:
        if "does not depend" in str(error):
            return torch.zeros_like(inputs[param])
        raise
    unit, values = derived.unit, []
    for name in unit.inputs:
        operand, key = unit.values[name]
        x = inputs[name] if operand != GRAD or name in inputs else grad
        if key is not None and unit.levels[key] != bound.unit.levels[key]:
            x = derived.stored[key].values(bound.stored[key].restored(x))
        values.append(x.contiguous())
    result = run(derived, patterns, values)
    key = bound.unit.values[param][1]
    if key is not None and unit.levels[key] != bound.unit.levels[key]:
        result = bound.stored[key].values(derived.stored[key].restored(result))
    return result


def run(
    bound: Bound, patterns: Mapping[str, Pattern], values: list[Any], skipped: bool = False
) -> Any:
    """Run a bound unit on tensors in its order.

    skipped : whether to leave the result unwritten, as only its gradients are needed
    """
    terms = bound.attaining(patterns)
    if not terms:
        return Run.apply(bound, patterns, skipped, *values)
    known = [x.detach() for x in values]
    best = bound(known, bound.empty(True))

    def sums(values: list[Any]) -> Any:
        count, total = terms
        number = count([*known, best, torch.ones_like(best)], count.empty(True))
        return run(total, patterns, [*values, best, 1 / number], skipped=True)

    return Known.apply(best, sums, *values)
