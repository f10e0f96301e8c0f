"""Traces of the calls that docs/map.md describes: which functions each visits, in order.

`python tests/trace_map.py` prints JSON: for each section the functions by first call.
"""

import ast
import json
import sys
import tempfile
from pathlib import Path

import torch
import tvm

import sparsetir
from compile_cache import Cache
from sparsetir import ops
from sparsetir.datasets import load_cora
from sparsetir.machine import assume, real_machine

PACKAGE = Path(sparsetir.__file__).parent
# Folders of the package behind symbolic links, by where they are.
LINKS = {str(link.resolve()): link.name for link in PACKAGE.iterdir() if link.is_symlink()}


def inside(file):
    """The path below the package of a file of it, or None."""
    path = Path(file)
    for folder, name in ((str(PACKAGE), "."), *LINKS.items()):
        if path.is_relative_to(folder):
            return str(Path(name) / path.relative_to(folder))
    return None


def names_of(file):
    """Qualified names of the functions of a file by the line where each begins."""
    names = {}

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                names[first] = f"{prefix}{child.name}"
                if isinstance(child, ast.ClassDef):
                    visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(Path(file).read_text()), "")
    return names


def traced(call):
    """Functions of the package that a call visits, as "file:name", by first visit."""
    calls, files = {}, {}

    def note(frame, event, _):
        if event == "call":
            calls.setdefault((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    visited = []
    for file, line in calls:
        where = inside(file)
        if where is not None:
            if file not in files:
                files[file] = names_of(file)
            if line in files[file]:
                visited.append(f"{where}:{files[file][line]}")
    return visited


class Messages(torch.nn.Module):
    """The model of the section about regions."""

    def forward(self, h, src, dst):
        """Sum the messages of each node."""
        messages = torch.sigmoid(h[src]) * h[dst]
        return torch.zeros_like(h).index_add_(0, dst, messages)


def schedule(program):
    """The calls of the section about schedules."""
    sch = sparsetir.Schedule(program)
    _, _, k = sch.get_sp_iters(sch.get_sparse_iteration("C"))
    sch.split(k, [None, 32])
    sch.lower()
    return sparsetir.build(sch)


def proof(program):
    """The refusal of the section about proofs."""
    sch = sparsetir.Schedule(program)
    _, j, _ = sch.get_sp_iters(sch.get_sparse_iteration("C"))
    try:
        sch.parallelize(j)
    except sparsetir.ScheduleError:
        return
    raise AssertionError("a sum was made parallel")


def sections():
    """The visited functions of each section, by its heading."""
    graph, X = load_cora(), torch.rand(2708, 64)
    visited = {"Life of a product": traced(lambda: ops.spmm(graph, X))}
    A = sparsetir.SparseMatrix(graph)
    ops.spmm(A, X)
    visited["The second call"] = traced(lambda: ops.spmm(A, X))
    model = torch.compile(Messages(), backend="sparsetir")
    src, dst = torch.randint(100, (2, 500), generator=torch.Generator().manual_seed(0))
    visited["Life of a region"] = traced(lambda: model(torch.rand(100, 16), src, dst))
    program = sparsetir.expression("C[i,k] = A[i,j] * B[j,k]", A="csr")
    visited["Life of a schedule"] = traced(lambda: schedule(program))
    visited["Life of a proof"] = traced(lambda: proof(program))
    return visited


if __name__ == "__main__":
    # Of kernels that earlier runs kept, passes within `tvm.compile` would be missing.
    with tempfile.TemporaryDirectory() as empty:
        cache = Cache(Path(empty), tvm.compile)
        cache.quick, tvm.compile = True, cache.compile
        small = real_machine()._replace(caches={"L2": 512 << 10})  # rows of X are not all in it
        with assume(small):
            print(json.dumps(sections()))
