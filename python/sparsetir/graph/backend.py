"""The backend of `torch.compile(model, backend="sparsetir")`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from functorch.compile import default_partition, make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._guards import TracingContext

from sparsetir.graph import ahead, capture, kept
from sparsetir.graph.batched import one_by_one
from sparsetir.graph.calls import Call
from sparsetir.graph.checked import Checked
from sparsetir.graph.copies import remove_copies
from sparsetir.graph.costs import Measured
from sparsetir.graph.operator import RUNNERS, called, in_order, sort
from sparsetir.graph.prelude import Prelude, Test, copy_results, edge_dependents, is_of_edges, split
from sparsetir.graph.products import take_products
from sparsetir.graph.regions import Found, rewrite
from sparsetir.graph.rest import Rest, Run, has_compiler
from sparsetir.graph.reuse import reuse_memory
from sparsetir.runtime.refusals import wrong

REST = "eager"  # the default for operators outside regions


class Options(NamedTuple):
    """See :func:`backend`."""

    rest: str
    check: bool = False


@dataclass
class Graph:
    """The regions of one of torch's graphs, and the operators left to torch.

    found, left : regions; and gathers and reductions outside regions, with reasons
    preludes : parts that depend on edges alone
    calls : calls of its regions; recorded unless it is None
    measured : for each direction, the costs of its regions and operators, if calls are recorded
    rest : for each direction that has run, why Inductor does not run the operators outside regions;
        "" if it does
    """

    found: list[Found] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    preludes: list[Prelude] = field(default_factory=list)
    calls: list[Call] | None = None
    measured: list[Measured] = field(default_factory=list)
    rest: dict[str, str] = field(default_factory=dict)

    def call(self, number: int) -> Call:
        """The call of a region, by its number in :attr:`found`, for `sparsetir.tune`.

        Raises ValueError for a region that has not run.
        """
        programs = [region.program for region in self.found]
        # Regions with equal programs run in the order of their numbers.
        before = programs[:number].count(programs[number])
        same = [call for call in self.calls or () if call.program == programs[number]]
        if len(same) <= before:
            raise ValueError(f"call: argument 'number': expected a region that ran, got {number}")
        return same[before]


class Backend:
    """A backend of torch.compile that keeps its graphs.

    noted : whether to record calls of regions and the costs of all operators
    graphs : the compiled graphs, in order
    """

    def __init__(self, noted: bool = False) -> None:
        self.graphs: list[Graph] = []
        self._noted = noted
        self.__name__ = "sparsetir"

    def __call__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Callable[..., Any]:
        about = Graph(calls=[] if self._noted else None)
        self.graphs.append(about)
        return compile_graph(module, inputs, about, _chosen(options))


def backend(
    module: fx.GraphModule, inputs: Sequence[Any],
    options: Mapping[str, Any] = MappingProxyType({}), mode: object = None,
) -> Callable[..., Any]:  # fmt: skip
    """Compile a graph of torch's; the backend registered as "sparsetir".

    options : "rest", what runs operators outside regions: "eager", torch's own kernels, or
        "inductor", a few percent faster per epoch, several times slower to compile; "check", True
        to compare the first results of each graph with those of torch's operators, and to raise
        RuntimeError if they differ
    mode : refused; torch.compile passes its own on
    """
    if mode is not None:
        raise wrong("torch.compile", "mode", "None for the backend 'sparsetir'", f"{mode!r}")
    chosen = _chosen(options)
    keep = chosen == Options("eager") and kept.may_keep()
    with kept.keeping() if keep else nullcontext():
        return compile_graph(module, inputs, Graph(), chosen, keep)


capture.install(lambda asked: asked is backend or isinstance(asked, Backend))


def strict_backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """:func:`backend` for callers that can fall back: a model that cannot be compiled, or has no
    region, fails in the first call, rather than in a later backward pass."""
    about, lowering = Graph(), {"force_non_lazy_backward_lowering": True}
    known = hasattr(functorch_config, *lowering)
    with functorch_config.patch(lowering if known else {}):
        run = compile_graph(module, inputs, about, Options(REST))
    if not about.found:
        raise ValueError("no region is found")
    return run


def _chosen(options: Mapping[str, Any]) -> Options:
    """Check the user's options."""
    for name in options:
        if name not in Options._fields:
            raise ValueError(f'options: sparsetir takes "rest" and "check" alone, got {name!r}')
    chosen = Options(**{"rest": REST, **options})
    if chosen.rest not in ("inductor", "eager"):
        raise ValueError(f'options["rest"]: expected "inductor" or "eager", got {chosen.rest!r}')
    if not isinstance(chosen.check, bool):
        raise TypeError(f'options["check"]: expected True or False, got {chosen.check!r}')
    if chosen.rest == "inductor" and not has_compiler():
        raise ValueError('options["rest"]: "inductor" needs a C++ compiler, and none is found')
    return chosen


def compile_graph(
    module: fx.GraphModule, inputs: Sequence[Any], about: Graph, options: Options,
    keep: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """Compile a graph of dynamo's to a function; record the outcome in `about`.

    keep : whether the function is kept in files, within :func:`kept.keeping`; if it is loaded from
        there, nothing is recorded
    """
    of_edges = set[str]()  # names of arguments
    returned = 0  # results that the forward graph returns to the caller
    checked = Checked(lambda: [f.node for f in about.found]) if options.check else None

    def is_edges(node: fx.Node) -> bool:
        return node.op == "placeholder" and node.name in of_edges

    def rewritten(graph: fx.GraphModule, results: int, known: Sequence[fx.Node]) -> None:
        nonlocal returned
        returned = results
        of_edges.update(n.name for n in filter(is_of_edges(known), known))
        regions, left = rewrite(graph, lambda graph: edge_dependents(graph, is_edges)[0])
        about.found += regions
        about.left += left
        ahead.begin(region.program.expected() for region in regions)
        copy_results(graph.graph, results, is_edges)
        remove_copies(graph.graph)

    def partition(joint: fx.GraphModule, given: Any, *, num_fwd_outputs: int, **more: Any) -> Any:
        places = [n for n in joint.graph.nodes if n.op == "placeholder"]
        (output,) = joint.graph.find_nodes(op="output")
        gradients = output.args[0][num_fwd_outputs:]
        arguments = places[: len(gradients)]
        known = [n for n, g in zip(arguments, gradients, strict=True) if g is None]
        if checked is not None:
            plain = copy.deepcopy(joint)
            fore, back = default_partition(plain, given, num_fwd_outputs=num_fwd_outputs, **more)
            checked.keep("forward", fore, num_fwd_outputs)
            checked.keep("backward", back)
        rewritten(joint, num_fwd_outputs, known)
        return default_partition(joint, given, num_fwd_outputs=num_fwd_outputs, **more)

    def runner(graph: fx.GraphModule, is_edges: Test | None, direction: str) -> Run:
        prelude = None if is_edges is None else split(graph, is_edges, returned)
        if keep:
            main = _direct(graph if prelude is None else prelude.main, None)
            return kept.Code(_whole, prelude, main, direction == "backward")
        run = _runner(graph, about, prelude, direct(direction))
        return run if checked is None else _boxed(checked.compare(direction, run))

    def direct(direction: str) -> Callable[[fx.GraphModule], Run]:
        def run(graph: fx.GraphModule) -> Run:
            if options.rest == "eager" and about.calls is not None:
                about.measured.append(Measured(_direct(graph, about.calls), direction, about.found))
                return about.measured[-1]
            if options.rest == "eager":
                return _function(_direct(graph, about.calls))
            whole = copy.deepcopy(graph)
            other = _function(_direct(graph, about.calls))
            return Rest(whole, other, partial(about.rest.__setitem__, direction))

        return run

    def forward(graph: fx.GraphModule, _: Any) -> Any:
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            # Backward does not write to its arguments, so it may run twice.
            context.fw_metadata.bw_donated_idxs = []
        return runner(graph, is_edges, "forward")

    def backward(graph: fx.GraphModule, _: Any) -> Any:
        run = runner(graph, None, "backward")
        return run if keep else _boxed(one_by_one(graph, run))

    def inference(graph: fx.GraphModule, _: Any) -> Any:
        (output,) = graph.graph.find_nodes(op="output")
        if checked is not None:
            checked.keep("inference", copy.deepcopy(graph))
        places = graph.graph.find_nodes(op="placeholder")
        rewritten(graph, len(output.args[0]), places)
        return runner(graph, is_edges, "inference")

    compilers = forward, backward, inference
    fore, back, infer = map(kept.compiler, compilers) if keep else compilers
    compiler = aot_autograd(
        fw_compiler=fore,
        bw_compiler=back,
        inference_compiler=infer,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return compiler(module, inputs)


def _runner(
    graph: fx.GraphModule,
    about: Graph,
    prelude: Prelude | None,
    direct: Callable[[fx.GraphModule], Run],
) -> Run:
    """The runner of a graph, with its prelude, if any, run separately."""
    if prelude is None:
        return _boxed(direct(graph))
    about.preludes.append(prelude)
    return _after(prelude, direct(prelude.main))


def _after(prelude: Prelude, main: Run) -> Run:
    """A function that runs a prelude, and the rest of its graph on its results."""

    def run(args: list[Any]) -> Any:
        main_args = prelude(args)
        args.clear()
        return main(main_args)

    return _boxed(run)


def _whole(prelude: Prelude | None, main: fx.GraphModule, is_backward: bool) -> Run:
    """The function of a graph that is kept."""
    run = _function(main) if prelude is None else _after(prelude, _function(main))
    return one_by_one(main, run) if is_backward else run


def _function(graph: fx.GraphModule) -> Run:
    """The function of a graph, which takes a list of arguments.

    It is looked up in each call: torch makes it in the first one.
    """
    return make_boxed_func(lambda *args: graph.forward(*args))


def _boxed(run: Run) -> Run:
    """Mark a function as taking a list of arguments that it empties, to free them early."""
    run._boxed_call = True
    return run


def _direct(graph: fx.GraphModule, calls: list[Call] | None) -> fx.GraphModule:
    """Replace calls of regions by direct ones that bypass torch's dispatcher.

    calls : the list that calls are recorded in
    """
    remove_copies(graph.graph)
    reuse_memory(graph.graph)
    take_products(graph.graph)
    for node in graph.graph.nodes:
        if node.target in RUNNERS:
            node.target, node.args = called(node, calls), node.args[1:]
        elif node.target is in_order:
            node.target = sort
    graph.recompile()
    return graph
