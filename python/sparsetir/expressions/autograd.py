"""Expressions of torch tensors, with gradients of any order from derived programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
        derived = bound.derived(bound.unit.gradient(param), patterns)
    except ValueError as error:
        if "does not depend" in str(error):
            return torch.zeros_like(inputs[param])
        raise
    unit, values = derived.unit, []
    for name in unit.inputs:
        operand, key = unit.values[name]
        x = inputs[name] if operand != GRAD or name in inputs else grad
        if key is not None and unit.patterns[key] != bound.unit.patterns[key]:
            x = derived.stored[key].values(bound.stored[key].restored(x))
        values.append(x.contiguous())
    result = run(derived, patterns, values)
    key = bound.unit.values[param][1]
    if key is not None and unit.patterns[key] != bound.unit.patterns[key]:
        result = bound.stored[key].values(derived.stored[key].restored(result))
    return result


def run(
    bound: Bound, patterns: Mapping[str, Pattern], values: list[Any], skipped: bool = False
) -> Any:
    """Run a bound unit on tensors in its order.

    skipped : whether to leave the result unwritten, as only its gradients are needed
    """
    if bound.unit.reduction is None:
        return Run.apply(bound, patterns, skipped, *values)
    best = bound([x.detach() for x in values], bound.empty(True))
    surrogate = _product if bound.unit.reduction == "product" else _extrema
    return Known.apply(best, partial(surrogate, bound, patterns, best), *values)


def _extrema(
    bound: Bound, patterns: Mapping[str, Pattern], best: Any, values: Sequence[Any]
) -> Any:
    """A function with the gradients of maxima or minima: those of the terms that attain them."""
    unit, known = bound.unit, [x.detach() for x in values]
    number = bound.derived(unit.surrogate("number"), patterns)
    weights = 1 / number([*known, best], number.empty(True))
    total = bound.derived(unit.surrogate("attaining"), patterns)
    return run(total, patterns, [*values, best, weights], skipped=True)


def _product(
    bound: Bound, patterns: Mapping[str, Pattern], product: Any, values: Sequence[Any]
) -> Any:
    """A function with the first and second gradients of products; of all orders without zeros."""
    unit, known = bound.unit, [x.detach() for x in values]

    def computed(kind: str) -> Any:
        other = bound.derived(unit.surrogate(kind), patterns)
        return other(known, other.empty(True))

    def zeros(kind: str) -> Any:
        """Zeros, with the gradients of a sum."""
        other = bound.derived(unit.surrogate(kind), patterns)
        return Known.apply(
            torch.zeros_like(product), lambda values: run(other, patterns, values, True), *values
        )

    change = zeros("logarithms").exp()
    if product.all():
        return product * change
    number, first = computed("number of zeros"), zeros("zeros")
    second = (first.square() - zeros("squares of zeros")) / 2  # the product of a pair
    none = torch.zeros_like(product)
    of_zeros = torch.where(number == 1, first, torch.where(number == 2, second, none))
    of_zeros = torch.where(number == 0, torch.ones_like(product), of_zeros)
    return computed("without zeros") * change * of_zeros
