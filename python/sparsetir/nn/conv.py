"""The base of all layers, and checks of their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetir.nn.graph import FLOWS, check_aggr, one_of
from sparsetir.runtime.refusals import wrong


class Conv(torch.nn.Module):
    """A layer with the applicable keyword arguments of PyG's `MessagePassing`.

    aggr : a reduction of :func:`sparsetir.ops.spmm`
    flow : "source_to_target"; or "target_to_source", for edges given as a (2, E) tensor, and not
        for a pair of features
    others : accepted only with PyG's defaults, as they have no effect here
    """

    aggr: Any
    flow: str

    def __init__(self, aggr: str, flow: str = FLOWS[0], **others: Any) -> None:
        super().__init__()
        caller = type(self).__name__
        self.aggr = check_aggr(caller, aggr)
        self.flow = one_of(caller, "flow", flow, FLOWS)
        for name, value in others.items():
            accepted = {"decomposed_layers": (1,), "node_dim": (0, -2), "aggr_kwargs": (None, {})}
            if name not in accepted:
                raise TypeError(f"{caller}: got an unexpected keyword argument '{name}'")
            if not any(
                value is x or (type(value) is type(x) and value == x) for x in accepted[name]
            ):
                raise wrong(caller, name, f"{accepted[name][0]!r}", f"{value!r}")

    def __repr__(self) -> str:
        channels = f"{self.in_channels}, {self.out_channels}"
        return f"{type(self).__name__}({channels})"


def pair(
    caller: str, x: Any, flow: str = FLOWS[0], dims: tuple[int, ...] = (2, 3)
) -> tuple[Tensor, Tensor | None]:
    """Features of sources and of targets, which are the same unless x is a pair.

    Raises TypeError and ValueError unless x has features of `dims` dimensions.
    """
    if not isinstance(x, (tuple, list)):
        check_features(caller, x, dims)
        return x, x
    if len(x) != 2:
        raise wrong(caller, "x", "a tensor or a pair", f"{len(x)} of them")
    if flow != FLOWS[0]:
        raise wrong(caller, "x", f"one tensor with flow={flow!r}", "a pair")
    for part in x[:1] if x[1] is None else x:
        check_features(caller, part, dims)
    return x[0], x[1]


def check_features(caller: str, x: Any, dims: tuple[int, ...] = (2, 3)) -> None:
    """Raise unless x is a dense or sparse tensor whose number of dimensions is in `dims`."""
    if not isinstance(x, Tensor):
        raise wrong(caller, "x", "a tensor", type(x).__name__, TypeError)
    if x.dim() not in dims:
        raise wrong(
            caller, "x", f"{' or '.join(map(str, dims))} dimensions", f"shape {tuple(x.shape)}"
        )


def sizes(
    caller: str, sources: Tensor, targets: Tensor | None, size: tuple[int | None, int | None] | None
) -> tuple[int, int]:
    """The numbers of sources and targets, by their features and by the argument `size`.

    Without features of targets and without a size, as many targets as sources.
    """
    counts = []
    expected = (None, None) if size is None else tuple(size)
    for at, x in enumerate((sources, targets)):
        if x is not None and expected[at] not in (None, x.shape[-2]):
            raise wrong(caller, "size", f"{x.shape[-2]} at {at} as the features have", expected[at])
        counts.append(expected[at] if x is None else x.shape[-2])
    n, m = counts
    return n, n if m is None else m


def weights_first(x: Tensor, weight: Tensor, out_channels: int) -> bool:
    """Whether to multiply by the weights before, rather than after, summing over neighbours.

    True if that moves fewer features along the edges, counting the backward pass only where needed:
    input features need no gradient.
    """
    if x.layout is not torch.strided:
        return True
    recording = torch.is_grad_enabled()
    before = x.shape[-1] * (2 if recording and x.requires_grad else 1)
    trained = x.requires_grad or weight.requires_grad
    return out_channels * (2 if recording and trained else 1) <= before
