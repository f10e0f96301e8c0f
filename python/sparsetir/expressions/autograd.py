"""Expressions of torch tensors, with gradients of any order from derived programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparsetir.expressions.unit import GRAD, Bound
from sparsetir.formats.pattern import Pattern


class Run(torch.autograd.Function):
    """A bound unit, whose gradients are bound units."""

    @staticmethod
    def forward(ctx: Any, bound: Bound, patterns: Mapping[str, Pattern], *values: Any) -> Any:
        ctx.bound, ctx.patterns = bound, patterns
        ctx.save_for_backward(*values)
        return bound([x.detach() for x in values], bound.empty(True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        bound, patterns, values = ctx.bound, ctx.patterns, ctx.saved_tensors
        unit, (grad,) = bound.unit, grads
        inputs = dict(zip(unit.inputs, values, strict=True))
        out: list[Any] = []
        for param, wanted in zip(unit.inputs, ctx.needs_input_grad[2:], strict=True):
            out.append(_gradient(bound, patterns, param, inputs, grad) if wanted else None)
        return None, None, *out


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


def run(bound: Bound, patterns: Mapping[str, Pattern], values: list[Any]) -> Any:
    """Run a bound unit on tensors in its order."""
    return Run.apply(bound, patterns, *values)
