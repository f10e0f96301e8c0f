"""Ways to compute the same in torch: constructed, checked, timed in turns, on a CPU or a GPU.

A comparison defines the operands of ways and their expected result. Its findings include which ways
are missing, wrong or have no gradients; wrong ones are not timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.harness import cuda
from bench.peers.gpu_clock import Clock, take_turns
from bench.timing import interleaved
from sparsetir.tuning.process import raise_priority
from sparsetir.tuning.serving import one_line

COPIES, ROUNDS, CALLS = 3, 5, 10
OF_GRADIENTS = 10  # multiple of the allowed error of results: gradients sum more terms
Call = Callable[[], Any]
Way = Callable[..., Any]
Makers = Mapping[str, Callable[[], Way]]


@dataclass(frozen=True)
class Device:
    """The device of the measured ways: a CPU, or a GPU with events as clock and copied operands.

    kernels : the target of our kernels
    clock : returns seconds; for a GPU see `gpu_clock`
    turns : rounds, calls and copies on a GPU; None on a CPU, for `seconds` and `least` rounds
    """

    name: str = "cpu"
    kernels: Any = "llvm"
    clock: Any = time.perf_counter
    turns: tuple[int, int, int] | None = None
    seconds: float = 1.0
    least: int = 5

    @classmethod
    def of(cls, args: argparse.Namespace, **more: Any) -> Device | None:
        """The device of the command line; None, with a message, if there is none."""
        if getattr(args, "target", "cpu") == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = False
            quick = (1, 2, COPIES)
            turns = quick if args.quick else (ROUNDS, CALLS, COPIES)
            return None if cuda() is None else cls("cuda", "cuda", Clock(torch), turns)
        torch.set_num_threads(args.threads)
        raise_priority()
        return cls(seconds=0.05 if args.quick else args.seconds, **more)

    @property
    def copies(self) -> int:
        """The number of copies of operands that take turns."""
        return self.turns[2] if self.turns else 1

    def times(self, calls: Mapping[str, Sequence[Call]]) -> dict[str, dict[str, float]]:
        """Minimum and median seconds of calls, for each copy of operands, that take turns."""
        if self.turns is None:
            first = {name: each[0] for name, each in calls.items()}
            return interleaved(first, self.seconds, self.least, clock=self.clock)
        ways = {name: lambda i, each=each: each[i]() for name, each in calls.items()}
        return take_turns(self.clock, ways, *self.turns)


@dataclass
class Comparison:
    """Operands of ways, and their expected result.

    copies : of the operands
    exact : a way whose result, and gradients, are right; in float32 or wider
    limit : the allowed error of results, relative to the largest number of the exact one
    written : the number of operands, the last ones, that ways write into; they hold NaN before
    grads : gradients of the result, for each copy; without them none are measured
    steps : the names of times without gradients and with them
    """

    copies: Sequence[Sequence[Any]]
    exact: Way
    limit: float = 1e-4
    grads: Sequence[Any] = ()
    steps: tuple[str, str] = ("forward", "backward")
    written: int = 0
    found: dict[str, Any] = field(default_factory=dict)

    def measure(self, makers: Makers, device: Device) -> dict[str, Any]:
        """Times of both steps by way; ways that are `missing`, `wrong`, or have `no_gradient`."""
        self.found = {"missing": {}, "wrong": {}, "no_gradient": {}}
        with torch.no_grad():
            wanted = self.exact(*map(_wide, self.copies[0]))
            ways = {n: w for n, make in makers.items() if (w := self._right(n, make, wanted))}
        forward = {n: [inference(w, x) for x in self.copies] for n, w in ways.items()}
        times = {self.steps[0]: device.times(forward)}
        if self.grads:
            # Last, since torch.compile does not retry what it has failed to compile.
            times[self.steps[1]] = device.times(self._with_gradients(ways))
        return times | self.found

    def _right(self, name: str, make: Callable[[], Way], wanted: Any) -> Way | None:
        try:
            way = make()
            for operands in self.copies:
                for out in operands[len(operands) - self.written :]:
                    out.fill_(torch.nan)
            result = way(*self.copies[0])
        except Exception as problem:  # from a peer that is absent, or does not support this
            self.found["missing"][name] = one_line(problem)
            return None
        if error := off(result, wanted, self.limit):
            self.found["wrong"][name] = error
            return None
        return way

    def _with_gradients(self, ways: Mapping[str, Way]) -> dict[str, list[Call]]:
        operands, calls = list(map(_wide, self.copies[0])), {}
        wanted = training(self.exact, operands, self.grads[0].float())()
        for name, way in ways.items():
            both = zip(self.copies, self.grads, strict=True)
            each = [training(way, x, grad) for x, grad in both]
            try:
                gradients = each[0]()
            except Exception as problem:  # in whatever way a peer reports a missing gradient
                self.found["no_gradient"][name] = one_line(problem)
                continue
            # Operands come first; parameters follow if both are modules.
            pairs = zip(gradients, wanted, strict=False)
            errors = [e for pair in pairs if (e := off(*pair, OF_GRADIENTS * self.limit))]
            if errors:
                self.found["wrong"][f"gradients of {name}"] = "; ".join(errors)
            else:
                calls[name] = each
        return calls


def _wide(x: Any) -> Any:
    return x.float() if x.is_floating_point() and x.dtype != torch.float64 else x


def off(result: Any, wanted: Any, limit: float) -> str | None:
    """The error of a result in words, or None; NaN is wrong."""
    error = (result.to(wanted.dtype) - wanted).abs().max() / (wanted.abs().max() + 1e-30)
    return None if error < limit else f"by {error.item():.2g}"


def inference(way: Way, operands: Sequence[Any]) -> Call:
    """A call without gradients."""

    def call() -> Any:
        with torch.no_grad():
            return way(*operands)

    return call


def training(way: Way, operands: Sequence[Any], grad: Any) -> Call:
    """A call with the gradients of operands, and of a module's parameters, as in a network."""
    leaves = [x.clone().requires_grad_() for x in operands]
    parameters: Iterable[Any] = way.parameters() if isinstance(way, torch.nn.Module) else ()
    wanted = [*leaves, *parameters]
    return lambda: torch.autograd.grad(way(*leaves), wanted, grad)
