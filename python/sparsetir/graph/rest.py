"""Compilation of operators outside regions by Inductor, if there is a C++ compiler.

A graph is compiled when it is first run, for the sizes of that run, so that data-dependent sizes
are numbers. Unlike under dynamo, Inductor is not allowed to overwrite arguments: some are cached
tensors of edges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import tracing
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols

from sparsetir.graph.operator import RUNNERS, called, numbered

Run = Callable[[list[Any]], Any]  # may empty the list
# Random numbers match eager mode. Numbers of regions are only valid in this process.
CONFIG = {"fallback_random": True, "fx_graph_cache": False, "fx_graph_remote_cache": False}


def has_compiler() -> bool:
    """Whether Inductor finds a C++ compiler."""
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()
    except Exception:  # of several kinds, by platform and version
        return False
    return True


class Rest:
    """A graph with regions, compiled by Inductor at its first run.

    graph : with regions as torch operators, for Inductor
    other : runs the graph for sizes other than those of the first run, and if Inductor fails
    tell : called at the first run with the reason why Inductor is not used, or ""
    """

    def __init__(self, graph: fx.GraphModule, other: Run, tell: Callable[[str], None]) -> None:
        self._graph: fx.GraphModule | None = graph
        self._other, self._tell = other, tell
        values = [n.meta.get("val") for n in graph.graph.find_nodes(op="placeholder")]
        # Dynamo guards the others.
        self._open = [n for n, x in enumerate(values) if x is not None and free_symbols(x)]
        self._any_size = any(
            free_symbols(values[n]) - free_unbacked_symbols(values[n]) for n in self._open
        )
        self._sizes: list[Any] = []
        self._run: Run | None = None

    def __call__(self, args: list[Any]) -> Any:
        if self._graph is not None:
            self._compile(args)
        run = self._run
        if run is None or self._sizes != self._sizes_of(args):
            run = self._other
        return run(args)

    def _sizes_of(self, args: Sequence[Any]) -> list[Any]:
        return [x.shape if isinstance(x := args[n], Tensor) else x for n in self._open]

    def _compile(self, args: Sequence[Any]) -> None:
        graph, self._graph = self._graph, None
        assert graph is not None
        if self._any_size:
            return self._tell("its sizes change")
        if any(isinstance(x, Tensor) and x.device.type != "cpu" for x in args):
            return self._tell("not on a CPU")
        self._sizes = self._sizes_of(args)
        try:
            self._run = _compiled(graph, args)
        except Exception as error:  # any error of Inductor: the graph is run without it
            return self._tell(str(error).strip().split("\n")[0] or type(error).__name__)
        self._tell("")


def _compiled(graph: fx.GraphModule, args: Sequence[Any]) -> Run:
    """Compile a graph by Inductor for arguments of these sizes."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch._subclasses import FakeTensorMode

    tensors = [n for n, x in enumerate(args) if isinstance(x, Tensor)]
    arguments, results = list(args), list[Any]()

    def traced(*fakes: Tensor) -> list[Tensor]:
        for n, x in zip(tensors, fakes, strict=True):
            arguments[n] = x
        results[:] = fx.Interpreter(graph).run(*arguments)
        return [x for x in results if isinstance(x, Tensor)]

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    modes = torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast()
    with modes[0], modes[1], modes[2], tracing(None), config.patch(CONFIG):
        fakes = [fake.from_tensor(args[n].detach(), static_shapes=True) for n in tensors]
        with fake:
            module = make_fx(traced, decomposition_table=select_decomp_table())(*fakes)
        regions = []
        for node in module.graph.nodes:
            if node.target in RUNNERS:
                regions.append(called(node))
                node.args = numbered(regions[-1]), *node.args[1:]
        (output,) = module.graph.find_nodes(op="output")
        # Each result has the strides that torch expects.
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        module.recompile()
        with V.set_fake_mode(fake):
            run = compile_fx_inner(module, fakes)
    others = [None if isinstance(x, Tensor) else (x,) for x in results]  # None, and sizes

    def call(args: list[Any], regions: Any = regions) -> Any:  # keeps regions alive
        inputs = [args[n] for n in tensors]
        args.clear()
        outputs = iter(run(inputs))
        return [next(outputs) if x is None else x[0] for x in others]

    return call
