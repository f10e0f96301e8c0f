"""The first run of each graph beside torch's own operators, where their user asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from sparsetir.graph.rest import Run

OFF = 1e-3  # of the largest number of a result


class _Saved(NamedTuple):
    """What a forward run saves for backward.

    plain : by torch's operators, as their backward graph takes it
    addresses : of the tensors that ours saves, which tell the run
    """

    plain: list[Any]
    addresses: list[int]

    @staticmethod
    def by(plain: Sequence[Any], found: Sequence[Any]) -> _Saved:
        """Of the last results of both graphs: tensors, then numbers, which backward takes first."""
        ordered = sorted(plain, key=lambda x: isinstance(x, Tensor))
        return _Saved(ordered, _addresses(found))

    def are_of(self, given: Sequence[Any]) -> bool:
        """Whether what our backward graph is given begins with what this run saved."""
        tensors = [x for x in given if isinstance(x, Tensor)]
        return _addresses(tensors[: len(self.addresses)]) == self.addresses


def _addresses(values: Sequence[Any]) -> list[int]:
    return sorted(x.data_ptr() for x in values if isinstance(x, Tensor))


class Checked:
    """Graphs as torch traced them, by direction, beside ours until backward was compared.

    Backward is compared for the last forward run alone, whose saved values are at hand.

    regions : names them, for a message
    """

    def __init__(self, regions: Callable[[], Sequence[str]]) -> None:
        self._regions = regions
        self._plain: dict[str, tuple[fx.GraphModule, int | None]] = {}
        self._saved: _Saved | None = None  # by the last forward run, for the backward graph

    def keep(self, direction: str, graph: fx.GraphModule, results: int | None = None) -> None:
        """A graph of torch's operators; the first results are compared, by default all."""
        self._plain[direction] = graph, results

    def around(self, direction: str, run: Run) -> Run:
        """`run`, whose first results are compared with those of the graph that was kept."""

        def checked(args: list[Any]) -> Any:
            plain, count = self._plain.get(direction, (None, None))
            if plain is None:
                return run(args)
            given = list(args)
            if direction == "backward":
                if self._saved is None or not self._saved.are_of(given):
                    return run(args)  # of a forward run before the last one
                kept = self._saved.plain  # what the forward graphs save is not the same
                places = plain.graph.find_nodes(op="placeholder")
                given = kept + given[len(given) - len(places) + len(kept) :]
            copies = [x.clone() if isinstance(x, Tensor) else x for x in given]
            with torch.random.fork_rng(devices=[]):  # dropout draws the same numbers
                expected = plain(*copies)
            found = run(args)
            if direction == "forward":
                self._saved = _Saved.by(expected[count:], found[count:])
            else:
                self._plain.clear()
                self._saved = None
            self._compare(direction, expected[:count], found)
            return found

        return checked

    def _compare(self, direction: str, expected: Sequence[Any], found: Sequence[Any]) -> None:
        for n, (a, b) in enumerate(zip(expected, found, strict=False)):
            if isinstance(a, Tensor) and (why := _difference(a, b)):
                raise RuntimeError(
                    f"torch.compile(backend='sparsetir'): result {n} of a {direction} graph is not "
                    f"that of torch's operators: {why}; its regions: {', '.join(self._regions())}"
                )


def _difference(expected: Tensor, found: Tensor) -> str:
    """In what a result differs, "" if in nothing but rounding."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        a, b = (f"{x.dtype} {tuple(x.shape)}" for x in (expected, found))
        return f"expected {a}, got {b}"
    exact, other = (x.detach().to(torch.float64) for x in (expected, found))
    finite = exact.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return f"{int((finite != other.isfinite()).sum())} numbers are finite in one of them alone"
    off = (exact - other)[finite].abs().max() if finite.any() else torch.zeros(())
    largest = exact[finite].abs().max() if finite.any() else off
    return f"it is off by {off:.3g}, of {largest:.3g}" if off > OFF * largest else ""
