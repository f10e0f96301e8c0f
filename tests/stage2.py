"""Schedule the stage II of the test programs, run them, and compare with their oracles.

The rows 0, 6 and 12 of the inputs are empty, the second case is empty altogether, and outputs hold
NaN before, so that an init that does not run shows. The function that was scheduled stays as it
was, and the map from buffers to axes survives.
"""

from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import s_tir

from cuda_runner import run_cuda
from gpu_runner import cuda_source, run_opencl
from programs import PROGRAMS, copied, tolerance
from sparsetir import build, default_schedule, lower_sparse_buffer, lower_sparse_iter
from sparsetir.sparse_ir.position_space import LAYOUTS, SIGNATURE, STAGE_TWO_ATTRS

GOLDEN = Path(__file__).parent / "golden"
CASES = ("small", "empty")


def only(sch):
    """The function of a schedule."""
    (func,) = sch.mod.functions.values()
    return func


def schedule(func, steps):
    """A schedule of a stage-I function's stage II; `steps` must leave what it copies alone."""
    lowered = lower_sparse_iter(func)
    before = tvm_ffi.structural_hash(lowered)
    sch = s_tir.Schedule(s_tir.renew_defs(lowered))
    steps(sch)
    assert tvm_ffi.structural_hash(lowered) == before
    layouts, kept = (f.attrs[LAYOUTS] for f in (lowered, only(sch)))
    assert sorted(layouts) == sorted(kept)
    for name in layouts:
        assert tvm_ffi.structural_equal(layouts[name], kept[name], map_free_vars=True)
    return sch


def run_cpu(sch, args):
    """The arrays after a run on the CPU."""
    args = copied(args)
    build(sch, "llvm")(**args)
    return args


def run_gpu(sch, args, run=run_opencl):
    """The arrays after a run of the GPU schedule as OpenCL; its CUDA text exists, too."""
    flat = lower_sparse_buffer(sch)
    assert "__global__" in cuda_source(flat)
    names = [p.name for p in only(sch).attrs[SIGNATURE].params]
    flat_names = [p.name for p in flat.params]
    out = run(flat, {f: args[n] for n, f in zip(names, flat_names)})
    return {n: out[f] for n, f in zip(names, flat_names) if f in out}


def run_gpu_as_cuda(sch, args):
    """The arrays after a run of the GPU schedule's CUDA text on the CPU."""
    return run_gpu(sch, args, run_cuda)


def check(name, sch, run, cases=CASES):
    """Run a scheduled test program, and compare."""
    program = PROGRAMS[name]
    for case in cases:
        args = program.inputs(np.random.default_rng(0), case, "float32", "int32")
        out, expected = run(sch, args), program.oracle(args)
        for output in program.outputs:
            np.testing.assert_allclose(out[output], expected[output], **tolerance("float32"))


def on_threads(func, lowered, target, make):
    """A function that runs the GPU's default schedule of another, as `make(stage III)` runs it.

    lowered : the function of stage II
    """
    flat = lower_sparse_buffer(default_schedule(lowered, tvm.target.Target(target)))
    kernel = make(flat)
    ours = {p.name: q.name for p, q in zip(func.params, flat.params, strict=True)}

    def run(args):
        after = kernel({ours[k]: v for k, v in args.items()})
        return {k: after[ours[k]] for k, v in args.items() if isinstance(v, np.ndarray)}

    return run


def loops(sch, block):
    return sch.get_loops(sch.get_sblock(block))


BLOCKS = {"spmm_ell": "spmm0", "row_softmax": "softmax0", "sddmm_fused": "sddmm1",
          "normalized_rows": "divide0", "mttkrp": "mttkrp0"}  # fmt: skip


def stage_two_table(text):
    """Parameters (program, names of loops, code) of a table: `[program: loops]`, then lines."""
    program, names, rows = "", "", []
    for line in text.replace("\\\n", "").strip().split("\n"):
        if line.startswith("[") and ": " in line and line.endswith("]") and "(" not in line:
            program, names = line.strip("[]").split(": ")
        else:
            rows.append(pytest.param(program, names.split(), line, id=f"{program}: {line}"))
    return rows


def stage_two_steps(program, names, code):
    """A function that runs a row of such a table on a schedule."""

    def steps(sch):
        name = BLOCKS.get(program, f"{program.split('_')[0]}1")
        scope = {"s": sch, "b": sch.get_sblock(name), "block": sch.get_sblock}
        scope |= {"loops": lambda of: loops(sch, of), **dict(zip(names, loops(sch, name)))}
        scope["rows"] = next(iter(loops(sch, name.replace("1", "0"))), None)
        exec(code, scope)

    return steps


def plain_text(func):
    """The script of a function without our attributes and without the comments on top."""
    for name in STAGE_TWO_ATTRS:
        if name in func.attrs:
            func = func.without_attr(name)
    lines = [_in_order(n) for n in func.script().splitlines() if not n.startswith("#")]
    return "\n".join(lines).strip() + "\n"


def _in_order(line):
    """A line with the regions of `T.reads` sorted: TVM's order is arbitrary."""
    head, _, rest = line.partition("T.reads(")
    if head.strip() or not rest:
        return line
    regions, depth = [""], 0
    for letter in rest[: rest.rindex(")")]:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            regions.append("")
        else:
            regions[-1] += letter
    return f"{head}T.reads({', '.join(sorted(r.strip() for r in regions))})"


def golden(name):
    """A text that was looked at and found right."""
    return "\n".join(map(_in_order, (GOLDEN / f"{name}.txt").read_text().split("\n")))
