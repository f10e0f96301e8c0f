"""The first run of each graph beside torch's own operators, where their user asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

Run = Callable[[list[Any]], Any]
OFF = 1e-3  # of the largest number of a result


class Checked:
    """Graphs as torch traced them, by direction, each until it has run once.

    regions : names them, for a message
    """

    def __init__(self, regions: Callable[[], Sequence[str]]) -> None:
        self._regions = regions
        self._plain: dict[str, tuple[fx.GraphModule, int | None]] = {}
        self._saved: list[Any] = []  # by the forward graph, for the backward one

    def keep(self, direction: str, graph: fx.GraphModule, results: int | None = None) -> None:
        """A graph of torch's operators; the first results are compared, by default all."""
        self._plain[direction] = graph, results

    def around(self, direction: str, run: Run) -> Run:
        """`run`, whose first results are compared with those of the graph that was kept."""

        def checked(args: list[Any]) -> Any:
            plain, count = self._plain.pop(direction, (None, None))
            if plain is None:
                return run(args)
            given = list(args)
            if direction == "backward":  # what the forward graphs save is not the same
                places = plain.graph.find_nodes(op="placeholder")
                given = self._saved + given[len(given) - len(places) + len(self._saved) :]
                self._saved = []
            state = torch.get_rng_state()
            copies = [x.clone() if isinstance(x, Tensor) else x for x in given]
            expected = plain(*copies)
            torch.set_rng_state(state)  # dropout draws the same numbers
            found = run(args)
            if direction == "forward":
                kept = expected[count:]
                self._saved = [x for x in kept if not isinstance(x, Tensor)]
                self._saved += [x for x in kept if isinstance(x, Tensor)]
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
