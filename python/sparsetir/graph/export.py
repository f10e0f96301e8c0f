"""Export of a trained model to a module that runs in TVM's runtime, without torch or this package.

`torch.export` returns a model's graph, for any graph of edges; regions are found in it as under
`torch.compile`, and :mod:`sparsetir.graph.to_relax` translates all of it to a module.
"""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from tvm import relax
from tvm.support.cc import get_cc

from sparsetir.graph.expressions import aten
from sparsetir.graph.to_relax import NAME, Translation
from sparsetir.runtime.kernel_file import write_module
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.targets import resolve_target
from sparsetir.sparse_ir.errors import LoweringError

# Operators that torch decomposes.
DECOMPOSED = [
    aten._log_softmax, aten._softmax, aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_no_training, aten.native_batch_norm, aten.elu,
    aten.addcmul, aten.silu,
]  # fmt: skip


def export(
    model: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    path: str | os.PathLike[str],
    *,
    target: Any = "llvm",
    overwrite: bool = False,
) -> None:
    """Write a trained model as a shared library that TVM's runtime runs, without torch.

    Its function `main` has the model's arguments, for graphs of any size, and returns its result.
    Edges are sorted, and norms computed, in each call::

        vm = tvm.relax.VirtualMachine(tvm.runtime.load_module("model.so"), tvm.cpu())
        out = vm["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(edge_index))

    Parameters
    ----------
    model : torch.nn.Module
        A model in float32 on a CPU; it is exported in evaluation mode, and not changed.
    inputs : sequence of torch.Tensor
        An example of its arguments: features (nodes, ...) float32, `edge_index` (2, edges) int64,
        numbers of edges (edges, ...) float32. Later numbers of nodes and of edges may differ, if
        they are not 0 or 1 here.
    path : str or path
        The library's path, which ends with ".so".
    target : str, dict or tvm.target.Target
        A CPU, "llvm" for this one.
    overwrite : bool
        Whether to replace an existing file.

    Raises
    ------
    TypeError
        For a model or inputs of another type.
    ValueError
        For another ending, and for a target that is not a CPU.
    FileExistsError
        If the file exists, unless `overwrite`.
    LoweringError
        For an unsupported operator of the model, with its name.
    RuntimeError
        Without a C compiler, which links the library; from torch, for a model that it cannot
        export.

    Notes
    -----
    `python -m bench graph --exported` measures such libraries.
    """
    path = Path(path)
    _check(model, inputs, path, overwrite)
    target = resolve_target(target)
    if target.kind.name != "llvm":
        raise wrong(NAME, "target", "a CPU", target.kind.name)
    module = Translation(_graph_of(model, tuple(inputs)), target).module()
    write_module(relax.build(module, target=target), path, overwrite)


def _check(model: Any, inputs: Any, path: Path, overwrite: bool) -> None:
    if not isinstance(model, torch.nn.Module):
        raise wrong(NAME, "model", "a torch.nn.Module", type(model).__name__, TypeError)
    for n, x in enumerate(inputs):
        if not isinstance(x, torch.Tensor):
            raise wrong(NAME, "inputs", "tensors", f"{type(x).__name__} at {n}", TypeError)
    if get_cc() is None:
        raise RuntimeError(f"{NAME}: expected a C compiler, which links the library, got none")
    if path.suffix != ".so":
        raise wrong(NAME, "path", "a name that ends with .so", f"{path.name!r}")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{NAME}: argument 'path': {path} exists; overwrite=True replaces it")


def _graph_of(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
    """Torch's exported program, for any number of nodes and of edges."""
    open_sizes: Any = torch.export.ShapesCollection()
    for x in inputs:
        if x.dim():
            first = 0 if x.is_floating_point() else x.dim() - 1
            open_sizes[x] = {first: torch.export.Dim.AUTO}
    training = [m for m in model.modules() if m.training]
    try:
        model.eval()
        with torch.no_grad():
            try:
                exported = torch.export.export(model, inputs, dynamic_shapes=open_sizes)
            except GuardOnDataDependentSymNode as error:
                raise LoweringError(
                    f"{NAME}: argument 'model': {_line_of(error)} needs a data-dependent number; "
                    "pools of graphs need 'size', the number of graphs"
                ) from error
            table = get_decompositions(DECOMPOSED)
            table |= {aten.native_layer_norm.default: _layer_norm, aten.mean.dim: _mean}
            return exported.run_decompositions().run_decompositions(table)
    finally:
        for part in training:
            part.training = True


def _line_of(error: Exception) -> str:
    """The line of a model, or of a library of layers, that torch cannot trace."""
    torch_ = Path(torch.__file__).parent
    frames = traceback.extract_tb(error.__traceback__)
    models = [
        f for f in frames if torch_ not in Path(f.filename).parents and f.filename != __file__
    ]
    last = models[-1] if models else frames[-1]
    return f"'{last.line}' ({last.filename}, line {last.lineno})"


def _mean(x: Any, dims: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
    count = math.prod(x.shape[d] for d in dims or range(x.dim()))
    return x.sum(dims, keepdim=keepdim, dtype=dtype) / count


def _layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    dims = list(range(-len(shape), 0))
    mean = x.mean(dims, keepdim=True)
    apart = x - mean
    scale = ((apart * apart).mean(dims, keepdim=True) + eps).rsqrt()
    scaled = apart * scale
    scaled = scaled if weight is None else scaled * weight
    return scaled if bias is None else scaled + bias, mean, scale
