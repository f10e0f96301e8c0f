"""Plans on an NVIDIA GPU, beside cuSPARSE, torch and a dense product, in this process.

Each call is timed by CUDA events after the level-2 cache was overwritten, see `gpu_clock`; calls
take turns with copies of their operands.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import sparsetir
from bench.harness import cuda
from bench.peers.cases import Case, rows_of
from bench.peers.cusparse import CuSparse
from bench.peers.gpu_clock import Clock, take_turns
from bench.peers.libraries import OURS
from bench.peers.ours import describe
from bench.peers.turns import Outcome
from sparsetir.schedules.operators.registry import OPERATORS
from sparsetir.tuning.serving import one_line

COPIES, ROUNDS, CALLS = 3, 5, 20
TARGET = "cuda"  # instead of a number of threads
MOST_DENSE = 2 * 10**9  # the most bytes of a dense matrix that is multiplied for comparison

Call = Callable[[int], Any]


@dataclass(frozen=True)
class Tensors:
    """A case on the GPU; `copies` of its dense operands and of an output of NaN."""

    indptr: Any
    indices: Any
    rows: Any
    values: Any
    copies: list[tuple[list[Any], Any]]


class Gpu:
    """An NVIDIA GPU instead of the processes of peers; see :class:`bench.run.Processes`.

    torch : with a CUDA device
    rounds, calls : in each round every way has a turn of `calls` calls
    """

    def __init__(self, torch: Any, args: argparse.Namespace) -> None:
        warnings.filterwarnings("ignore", message="Sparse", category=UserWarning)
        torch.set_grad_enabled(False)
        torch.backends.cuda.matmul.allow_tf32 = False
        self.torch, self.peers = torch, args.peers
        self.rounds, self.calls = (2, 3) if args.quick else (ROUNDS, CALLS)
        self.settings = {"rounds": self.rounds, "calls": self.calls, "copies": COPIES}
        self.clock = Clock(torch)
        self.library: CuSparse | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Gpu | None:
        """The GPU; None, with a message, if there is no device."""
        torch = cuda()
        return None if torch is None else cls(torch, args)

    def measured(self, case: Case) -> list[dict[str, Any]]:
        """A cell in the form of :func:`bench.peers.turns.compare`."""
        reference, tensors = case.check(), self._tensors(case)
        out, ways = Outcome(), dict[tuple[str, str], Call]()
        makers = {
            OURS: self._ours, "cusparse": self._cusparse, "torch": self._torch,
            "dense": self._dense,
        }  # fmt: skip
        self.about: dict[str, Any] = {}
        for name in (n for n in makers if n == OURS or self.peers is None or n in self.peers):
            refused: dict[str, str] = {}
            try:
                calls_of = makers[name](case, tensors)
            except Exception as error:  # reported at the end, with all others
                calls_of, refused = {}, {"": one_line(error)}
            for variant, call in calls_of.items():
                for _, result in tensors.copies:
                    result.fill_(float("nan"))
                try:
                    problem = reference.error(self._numpy(call(0)))
                except Exception as error:
                    refused[variant] = one_line(error)
                    continue
                if out.right(name, variant, problem):
                    ways[name, variant] = call
            if len(refused) >= len(calls_of):
                why = "; ".join(refused.values()) or f"has no {case.op} of {case.dtype} here"
                out["failed" if name == OURS else "missing"][name] = why
            out["peers"][name] = {
                "about": self.about if name == OURS else {}, "refused": refused
            }  # fmt: skip
        times = take_turns(self.clock, ways, self.rounds, self.calls, COPIES)
        for peer in dict.fromkeys(name for name, _ in times):
            out.add(peer, {variant: t for (name, variant), t in times.items() if name == peer})
        if self.library:
            self.library.release()
        return [{"threads": TARGET, **out.with_times()}]

    def _tensors(self, case: Case) -> Tensors:
        torch, a = self.torch, case.matrix
        dtype = getattr(torch, case.dtype)
        shape = OPERATORS[case.op].shapes(a.shape, a.nnz, case.feat, None)["out"]

        def on_gpu(array: np.ndarray) -> Any:
            return torch.from_numpy(array).cuda()

        copies = []
        for _ in range(COPIES):
            out = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
            copies.append(([on_gpu(x).to(dtype) for x in case.operands], out))
        indptr, indices, rows = (on_gpu(x) for x in (a.indptr, a.indices, rows_of(a)))
        return Tensors(indptr, indices, rows, on_gpu(a.data).to(dtype), copies)

    def _numpy(self, result: Any) -> np.ndarray:
        sparse = result.layout == self.torch.sparse_csr
        return (result.values() if sparse else result).float().cpu().numpy()

    def _ours(self, case: Case, tensors: Tensors) -> dict[str, Call]:
        plan = sparsetir.plan(case.op, case.matrix, case.feat, dtype=case.dtype, target=TARGET)
        self.about = {"plans": {"default": describe(plan)}}
        return {"default": lambda i: plan(*tensors.copies[i][0], out=tensors.copies[i][1])}

    def _cusparse(self, case: Case, tensors: Tensors) -> dict[str, Call]:
        self.library = self.library or CuSparse(self.torch)
        return self.library.prepare(case, tensors)

    def _torch(self, case: Case, tensors: Tensors) -> dict[str, Call]:
        """CSR tensors, for which torch calls cuSPARSE from scratch each time."""
        torch, copies = self.torch, tensors.copies
        matrix = torch.sparse_csr_tensor(
            tensors.indptr, tensors.indices, tensors.values, case.matrix.shape
        )
        if case.op == "sddmm":
            addmm = torch.sparse.sampled_addmm
            operands = [(x, y.t()) for (x, y), _ in copies]
            return {"sampled_addmm": lambda i: addmm(matrix, *operands[i], beta=0.0)}
        return {"new": lambda i: matrix @ copies[i][0][0]}

    def _dense(self, case: Case, tensors: Tensors) -> dict[str, Call]:
        """CuBLAS with all zeros stored, if that fits: the competitor of a pruned weight."""
        torch, a = self.torch, case.matrix
        size = a.shape[0] * a.shape[1] * tensors.values.element_size()
        if case.op == "sddmm" or size > MOST_DENSE:
            return {}
        matrix = torch.zeros(a.shape, dtype=tensors.values.dtype, device="cuda")
        matrix[tensors.rows.long(), tensors.indices.long()] = tensors.values
        product = torch.mm if case.op == "spmm" else torch.mv
        return {"mm": lambda i: product(matrix, tensors.copies[i][0][0], out=tensors.copies[i][1])}
