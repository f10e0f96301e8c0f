"""Comparison of the first run of each graph with torch's own operators, on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from sparsetir.graph.expressions import dtype_of
from sparsetir.graph.rest import Run
from sparsetir.ops.tensors import DTYPES

OFF = 1e-3  # tolerance relative to the largest number of a result
ROUNDINGS = 8  # or as many roundings in the coarsest type of the graph, if that is more


class _Saved(NamedTuple):
    """The values that a forward run saves for backward.

    plain : values of torch's operators, in the order of their backward graph
    addresses : addresses of the tensors that our graph saves, which identify the run
    """

    plain: list[Any]
    addresses: list[int]

    @staticmethod
    def by(plain: Sequence[Any], ours: Sequence[Any]) -> _Saved:
        """Take the last results of both graphs; numbers move first, where backward expects them."""
        ordered = sorted(plain, key=lambda x: isinstance(x, Tensor))
        return _Saved(ordered, _addresses(ours))

    def are_of(self, arguments: Sequence[Any]) -> bool:
        """Whether the arguments of our backward graph begin with what this run saved."""
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        return _addresses(tensors[: len(self.addresses)]) == self.addresses


def _addresses(values: Sequence[Any]) -> list[int]:
    return sorted(x.data_ptr() for x in values if isinstance(x, Tensor))


class Checked:
    """Graphs of torch's operators by direction, kept until backward has been compared with ours.

    Backward is compared only for the last forward run, whose saved values are available.

    regions : returns the names of the regions, for a message
    """

    def __init__(self, regions: Callable[[], Sequence[str]]) -> None:
        self._regions = regions
        self._plain: dict[str, tuple[fx.GraphModule, int | None]] = {}
        self._saved: _Saved | None = None  # by the last forward run, for the backward graph

    def keep(self, direction: str, graph: fx.GraphModule, results: int | None = None) -> None:
        """Keep a graph of torch's operators; results : how many are compared, by default all."""
        self._plain[direction] = graph, results

    def compare(self, direction: str, run: Run) -> Run:
        """Wrap `run` to compare its first results with those of the kept graph."""

        def checked(args: list[Any]) -> Any:
            plain, count = self._plain.get(direction, (None, None))
            if plain is None:
                return run(args)
            plain_args = list(args)
            if direction == "backward":
                if self._saved is None or not self._saved.are_of(plain_args):
                    return run(args)  # for an earlier forward run
                kept = self._saved.plain  # the forward graphs save different values
                places = plain.graph.find_nodes(op="placeholder")
                plain_args = kept + plain_args[len(plain_args) - len(places) + len(kept) :]
            copies = [x.clone() if isinstance(x, Tensor) else x for x in plain_args]
            with torch.random.fork_rng(devices=[]):  # dropout draws the same numbers
                expected = plain(*copies)
            ours = run(args)
            if direction == "forward":
                self._saved = _Saved.by(expected[count:], ours[count:])
            else:
                self._plain.clear()
                self._saved = None
            self._compare(direction, expected[:count], ours, _tolerance(plain.graph))
            return ours

        return checked

    def _compare(
        self, direction: str, expected: Sequence[Any], ours: Sequence[Any], tolerance: float
    ) -> None:
        for n, (a, b) in enumerate(zip(expected, ours, strict=False)):
            if isinstance(a, Tensor) and (why := _difference(a, b, tolerance)):
                raise RuntimeError(
                    f"torch.compile(backend='sparsetir'): result {n} of a {direction} graph is not "
                    f"that of torch's operators: {why}; its regions: {', '.join(self._regions())}"
                )


def _tolerance(graph: fx.Graph) -> float:
    """The tolerance for results of a graph, by the coarsest type of its values."""
    roundings = (torch.finfo(dtype).eps for n in graph.nodes if (dtype := dtype_of(n)) in DTYPES)
    return max(OFF, ROUNDINGS * max(roundings, default=0.0))


def _difference(expected: Tensor, ours: Tensor, tolerance: float) -> str:
    """The difference of a result beyond rounding, as text; "" for none."""
    if expected.shape != ours.shape or expected.dtype != ours.dtype:
        a, b = (f"{x.dtype} {tuple(x.shape)}" for x in (expected, ours))
        return f"expected {a}, got {b}"
    exact, other = (x.detach().to(torch.float64) for x in (expected, ours))
    finite = exact.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return f"{int((finite != other.isfinite()).sum())} numbers are finite in one of them alone"
    off = (exact - other)[finite].abs().max() if finite.any() else torch.zeros(())
    largest = exact[finite].abs().max() if finite.any() else off
    return f"it is off by {off:.3g}, of {largest:.3g}" if off > tolerance * largest else ""
