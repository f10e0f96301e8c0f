"""Random legal sequences of stage-I primitives, on every test program: the meaning stays.

What comes out is a valid function, which prints and parses back; the interpreter gives what it gave
before; so do kernels, with the default schedule and without any, and with loops divided among
threads of a GPU; and it builds for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from hypothesis import strategies as st

import sparsetir
from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from drawing import examples
from programs import PROGRAMS, copied, tolerance
from random_schedules import schedule_at_random
from sparsetir.sparse_ir.schedule.precompute import SCOPES
from sparsetir.sparse_ir.verify import verify

TYPES = (("float32", "int32"), ("float32", "int64"), ("float16", "int32"), ("float64", "int64"))
GPU = {"kind": "cuda", "arch": "sm_90"}


class Case:
    """A program with arguments, a schedule of it, and what the interpreter gives without it."""

    def __init__(
        self, data: Any, name: str, scopes: Sequence[str] = SCOPES, threads: bool = False
    ) -> None:
        def choose(options: Any) -> Any:
            return data.draw(st.sampled_from(list(options)))

        self.program = PROGRAMS[name]
        case = choose(self.program.cases)
        self.dtype, idtype = choose(TYPES)
        self.func = func = self.program.make(self.dtype, idtype)
        rng = np.random.default_rng(len(name))
        self.arguments = self.program.inputs(rng, case, self.dtype, idtype)
        self.expected = copied(self.arguments)
        sparsetir.interpret(func, self.expected)
        finite = case != "nonfinite"
        self.sch = schedule_at_random(
            func, self.arguments, choose, 9 if threads else 6, finite, scopes, threads
        )

    def check(self, run: Callable[..., Any]) -> None:
        """What `run` writes is what the interpreter wrote."""
        arguments = copied(self.arguments)
        run(arguments)
        for output in self.program.outputs:
            np.testing.assert_allclose(
                np.asarray(arguments[output], np.float64),
                np.asarray(self.expected[output], np.float64),
                **tolerance(self.dtype),
                err_msg=f"{self.sch.trace}\n{self.sch.func.script()}",
            )


def check_meaning(data: Any, name: str) -> None:
    """Verified, parsed back, interpreted, replayed."""
    case = Case(data, name)
    func = case.sch.func
    verify(func)
    again = sparsetir.from_source(func.script())
    assert tvm_ffi.structural_equal(again, func, map_free_vars=True)
    case.check(lambda arguments: sparsetir.interpret(func, arguments))
    replayed: dict[str, Any] = {}
    exec(case.sch.trace.as_python(), replayed)
    other = sparsetir.Schedule(case.func)
    replayed["apply"](other)
    assert tvm_ffi.structural_equal(other.func, func, map_free_vars=True)


def check_kernels(data: Any, name: str) -> None:
    """Compiled for this CPU, with the default schedule and with none."""
    case = Case(data, name)
    for bare in (False, True):
        if bare:
            case.sch.lower()
        kernel = sparsetir.build(case.sch)
        case.check(lambda arguments, kernel=kernel: kernel(**arguments))


def check_gpu(data: Any, name: str) -> None:
    """The default schedule for a GPU builds; what is shared there is for schedules to say."""
    case = Case(data, name, ("local", "global"))
    kernel = sparsetir.build(case.sch, GPU)
    assert "__global__" in kernel.source()


def check_threads(data: Any, name: str) -> None:
    """Loops divided among blocks and threads, as CUDA on a CPU; or they are refused."""
    case = Case(data, name, ("local", "global"), threads=True)
    try:
        kernel = CudaStages(case.sch, None)
    except (sparsetir.LoweringError, sparsetir.ScheduleError):
        return

    def run(arguments: dict[str, Any]) -> None:
        for called, array in kernel(arguments, equal=True).items():
            if called in arguments:
                arguments[called][...] = array

    case.check(run)


ON_GPU = [name for name, program in PROGRAMS.items() if program.gpu]
ANY = st.sampled_from(list(PROGRAMS))
DATA = st.data()
test_meaning = examples(2, 25, "name", PROGRAMS, data=DATA)(check_meaning)
test_kernels = examples(12, 120, data=DATA, name=ANY)(check_kernels)
test_gpu = examples(5, 100, data=DATA, name=st.sampled_from(ON_GPU))(check_gpu)
test_threads = requires_cuda_text(
    examples(4, 120, data=DATA, name=st.sampled_from(ON_GPU))(check_threads)
)
