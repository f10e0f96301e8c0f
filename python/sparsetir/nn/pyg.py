"""PyTorch Geometric's own layers on sparsetir's kernels."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from operator import attrgetter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state
from torch.autograd import forward_ad

from sparsetir.nn.graph import remembered
from sparsetir.nn.pyg_compiled import HOOKS, METHODS, is_hooked, most_edges, run_layer, varies
from sparsetir.ops.cache import is_private, private
from sparsetir.ops.products import spmm
from sparsetir.ops.registry import is_transformed
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.targets import host_target, vector_bits

SIMPLE_MESSAGE = {"self", "x_j", "edge_weight"}
# Edges of a call from which a layer is compiled, so that a hundred epochs make up for the seconds.
EDGES = 50_000
# A layer whose calls differ in their number of edges trains on many batches in each epoch: it is
# compiled from this share of as many edges, about the fewest that gain (GAT on Zen 5: 5,000).
SHARE_OF_BATCHES = 1 / 6
# Layers with a fused product of their own gain by our dense products. Those are twice as fast as
# torch's with vectors of so many bits (Zen 5, whose AVX-512 MKL leaves unused), and as fast
# without: steps with 10,000 edges then take 1.3 times as long as uncompiled ones (Zen 3).
WIDE_VECTORS = 512
MISSING = object()
# Owner, its attributes, a name, the old and the new value.
Replacement = tuple[Any, Mapping[str, Any], str, Any, Any]
REDUCTIONS = ("sum", "add", "mean", "min", "max")  # of PyG's `spmm`
# Required attributes of layers, some of them private, which other versions of PyG may lack.
NEEDED = (
    *METHODS, *HOOKS,
    "propagate", "fuse", "flow", "decomposed_layers", "explain",
    "aggr_module",
    "inspector.get_param_names",
)  # fmt: skip


class EdgeAdjacency:
    """PyG's edges as a matrix for a layer's `message_and_aggregate`."""

    def __init__(self, edge_index: Tensor, weight: Tensor | None, shape: tuple[int, int]) -> None:
        self.edge_index, self.weight, self.shape = edge_index, weight, shape

    def size(self, dim: int) -> int:
        """The number of targets (0) or sources (1)."""
        return self.shape[dim]

    def spmm(self, x: Tensor, reduce: str) -> Tensor:
        """Reduce messages at targets."""
        weight = None if self.weight is None else self.weight.reshape(-1)
        if weight is not None and weight.dtype != x.dtype:
            dtype = torch.promote_types(x.dtype, weight.dtype)
            x, weight = x.to(dtype), weight.to(dtype)
        return spmm((self.edge_index, self.shape[::-1]), x, reduce=reduce, values=weight)


class accelerate(AbstractContextManager["accelerate"]):
    """Make PyG's layers run on our kernels, from now on until `undo()` or the end of `with`.

    It replaces `torch_geometric.utils.spmm`, which layers with a sparse adjacency matrix call; and
    for edges as a (2, E) tensor the layers whose messages are features of neighbours, with or
    without a weight, and which implement a fused sparse product: `GCNConv`, `SAGEConv`, `GINConv`,
    `GraphConv`, `APPNP`, `SGConv`, `TAGConv`, `LGConv` and others. The normalised edges of GCN and
    similar layers (`gcn_norm`) are cached for unchanged edges and weights; not for weights that
    need gradients.

    Other layers (`GATConv`, `TransformerConv`, `RGCNConv`, the user's own `MessagePassing`) are
    compiled as by `torch.compile(backend="sparsetir")`, one by one, in their first call with many
    edges, which takes seconds; again in evaluation, and for the second graph of another size unless
    graphs differed in size before. All layers are compiled for mini-batches, whose numbers of edges
    differ, from the second one on. Compiled layers have no second derivatives. Layers that torch
    cannot trace as one graph, or that reduce no edges, run unchanged, and so do layers with hooks
    or under explanation, sparse matrices, and `EdgeIndex`. Types are float32, float64, bfloat16,
    float16, and those of autocast. All layers are PyG's own while torch captures a model
    (`torch.compile`, `torch.jit`, `torch.fx`, hence `to_hetero`), and under forward-mode
    differentiation.

    It applies to all threads, may be nested, and may be entered again after its end::

        with accelerate():
            out = model(x, edge_index)

        patch = accelerate()      # for the whole program
        ...
        patch.undo()

    Parameters
    ----------
    compile_from : int, optional
        Edges of a call from which a layer is compiled; None for never. Small graphs gain little, or
        lose. A layer whose calls differ in their number of edges, as on mini-batches, is compiled
        from a sixth as many in its second call; one with a fused product only on CPUs with
        AVX-512. Of nested uses the innermost counts.

    Raises
    ------
    ImportError
        Without torch_geometric.
    RuntimeError
        For a torch_geometric whose layers lack a required attribute; nothing is changed then.
    """

    def __init__(self, compile_from: int | None = EDGES) -> None:
        if compile_from is not None and (
            isinstance(compile_from, bool) or not isinstance(compile_from, int) or compile_from < 0
        ):
            raise wrong("accelerate", "compile_from", "0 or more, or None", f"{compile_from!r}")
        self._compile_from = compile_from
        self._undone = False
        self._depth = 0
        _patches.begin(compile_from)

    def __enter__(self) -> accelerate:
        with _patches.lock:  # threads may share it
            if self._undone:
                _patches.begin(self._compile_from)
                self._undone = False
            self._depth += 1
        return self

    def undo(self) -> None:
        """Restore PyG, unless another `accelerate` is still active."""
        with _patches.lock:
            if not self._undone:
                self._undone = True
                _patches.end(self._compile_from)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with _patches.lock:
            self._depth -= 1
            if not self._depth:
                self.undo()


class _Patches:
    """Replaced attributes of PyG, with their old values."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._users: list[int | None] = []  # each one's number of edges to compile from
        self._replaced: list[Replacement] = []
        # A search takes milliseconds, and training enters in each step: what the last one returned
        # is used again, unless modules were imported or attributes replaced since.
        self._found: list[Replacement] = []
        self._searched = 0  # how many modules there were

    def begin(self, compile_from: int | None) -> None:
        """Add a user; a failure changes nothing."""
        with self.lock:
            if not self._users:
                try:
                    self._install()
                except BaseException:
                    self._restore()
                    raise
            self._users.append(compile_from)

    def end(self, compile_from: int | None) -> None:
        """Remove a user; the last one restores PyG."""
        with self.lock:
            self._users.remove(compile_from)
            if not self._users:
                self._restore()

    def _restore(self) -> None:
        for owner, attributes, name, old, new in reversed(self._replaced):
            # A later replacement by others is left alone.
            if attributes.get(name) is new:
                if old is MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, old)
        self._replaced.clear()

    def _script(self, old: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `torch.jit.script` with PyG restored, as it compiles sources of functions."""
        kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 2
        with self.lock:
            self._restore()
            try:
                return old(*args, **kwargs)
            finally:
                if self._users:
                    self._install()

    def _replace(self, replacement: Replacement) -> None:
        self._replaced.append(replacement)
        owner, _, name, _, new = replacement
        setattr(owner, name, new)

    def _install(self) -> None:
        from torch_geometric import backend
        from torch_geometric.typing import WITH_SEGMM

        if len(sys.modules) != self._searched or any(
            attributes.get(name, MISSING) is not old for _, attributes, name, old, _ in self._found
        ):
            _check()
            self._search()
        for replacement in self._found:
            self._replace(replacement)
        if not WITH_SEGMM and backend.use_segment_matmul is None:
            # `RGCNConv` decides in each call by numbers that break graphs.
            self._replace(_replacement(backend, "use_segment_matmul", False))

    def _search(self) -> None:
        """Find what to replace from the beginning, by what."""
        from torch_geometric.nn import MessagePassing
        from torch_geometric.nn.conv.gcn_conv import gcn_norm
        from torch_geometric.utils import spmm

        # Copies, as another thread may import meanwhile.
        modules = sys.modules.copy()
        of_pyg = [m for n, m in modules.items() if n.startswith("torch_geometric")]
        half_imported = any(getattr(m.__spec__, "_initializing", False) for m in of_pyg)
        self._searched = 0 if half_imported else len(modules)
        replaced = {
            spmm: _with_fallback(spmm, _spmm),
            gcn_norm: _with_fallback(gcn_norm, _gcn_norm),
        }
        self._found = [
            _replacement(module, name, new)
            for module in of_pyg
            for name, value in vars(module).copy().items()
            for old, new in replaced.items()
            if value is old
        ]
        self._found += [
            _replacement(MessagePassing, "_call_impl", self._call_of(MessagePassing)),
            _replacement(torch.jit, "script", _with_fallback(torch.jit.script, self._script)),
        ]

    def _call_of(self, base: type) -> Callable[..., Any]:
        """A call that compiles layers on batches, and those that are no sparse product."""
        before = vars(base).get("_call_impl")

        def old(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if before is not None:
                return before(layer, *args, **kwargs)
            # Looked up in each call, as a tracer of torch.fx may replace it.
            parent: Any = super(base, layer)
            return parent._call_impl(*args, **kwargs)

        @functools.wraps(base._call_impl)
        def new(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return old(layer, *args, **kwargs)
            self._wrap_propagate(type(layer))
            least = next(reversed(self._users), None)  # another thread may end
            if least is None:
                return old(layer, *args, **kwargs)
            edges = most_edges((args, kwargs))
            if edges < least * SHARE_OF_BATCHES:
                return old(layer, *args, **kwargs)
            in_batches = varies(layer, edges)
            if _is_product(layer):
                wide = vector_bits(host_target()) >= WIDE_VECTORS
                pays = in_batches and (wide or edges >= least)
            else:
                pays = in_batches or edges >= least
            if not pays:
                return old(layer, *args, **kwargs)
            return run_layer(layer, old, args, kwargs, in_batches)

        return new

    def _wrap_propagate(self, layer: type) -> None:
        """Replace a class's own `propagate`, which it gets with its first instance."""
        original = vars(layer).get("propagate")
        if original is not None and not hasattr(original, "is_sparsetir"):
            new = _with_fallback(original, _propagate)
            new.is_sparsetir = True
            with self.lock:
                # Another thread may have ended all uses, or done this.
                if self._users and vars(layer).get("propagate") is original:
                    self._replace(_replacement(layer, "propagate", new))


def _replacement(owner: Any, name: str, new: Any) -> Replacement:
    attributes = vars(owner)
    return owner, attributes, name, attributes.get(name, MISSING), new


_patches = _Patches()


def _check() -> None:
    """Raise RuntimeError if PyG's layers lack a required attribute."""
    from torch_geometric import __version__
    from torch_geometric.nn import LGConv

    try:
        attrgetter(*NEEDED)(LGConv())
    except AttributeError as error:
        raise RuntimeError(
            f"accelerate: expected another version of torch_geometric than {__version__}: {error}"
        ) from error


def _with_fallback(old: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `run(old, ...)`, except where PyG's own operators are needed."""

    @functools.wraps(old)
    def new(*args: Any, **kwargs: Any) -> Any:
        # Who imported it meanwhile has it after the end, too.
        use_old = not _patches._users or _wants_pyg()
        return old(*args, **kwargs) if use_old else run(old, *args, **kwargs)

    return new


def _wants_pyg() -> bool:
    """Whether torch captures a model as a graph, or differentiates in forward mode."""
    return (
        torch.compiler.is_compiling()
        or _get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def _spmm(old: Callable[..., Tensor], src: Any, other: Tensor, reduce: str = "sum") -> Tensor:
    """PyG's `spmm` by our kernels; unsupported or invalid arguments are left to PyG."""
    from torch_geometric.utils import is_sparse

    if isinstance(src, EdgeAdjacency):
        return src.spmm(other, reduce)
    is_matrix = isinstance(other, Tensor) and other.dim() == 2 and other.is_floating_point()
    if not is_matrix or not is_sparse(src) or reduce not in REDUCTIONS:
        return old(src, other, reduce)
    if isinstance(src, Tensor) and src.layout is not torch.sparse_csr:
        if src.layout is torch.sparse_coo or not other.requires_grad:
            layout = f"once while it lives (got '{src.layout}')"
            warnings.warn(f"Converting sparse tensor to CSR format, {layout}", stacklevel=3)
    return spmm(src, other, reduce=reduce)


def _gcn_norm(
    old: Callable[..., Any], edge_index: Any, edge_weight: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """PyG's `gcn_norm`, with results cached for unchanged edges and weights."""
    tensors = (edge_index,) if edge_weight is None else (edge_index, edge_weight)
    # Anything but plain edges without gradients.
    if (
        is_transformed()
        or any(type(x) is not Tensor or x.layout is not torch.strided for x in tensors)
        or any(x.requires_grad for x in tensors)
    ):
        return old(edge_index, edge_weight, *args, **kwargs)

    def make() -> list[Tensor | None]:
        # Without self loops PyG returns the argument, which must not be kept alive.
        results = old(edge_index, edge_weight, *args, **kwargs)
        return [None if x is edge_index else private(x) for x in results]

    key = "gcn_norm", args, tuple(sorted(kwargs.items()))
    edges, weight = results = remembered(tensors, key, make)
    if not all(x is None or is_private(x) for x in results):  # a caller wrote to them
        return old(edge_index, edge_weight, *args, **kwargs)
    return edge_index if edges is None else edges, weight


def _propagate(
    old: Callable[..., Tensor], layer: Any, edge_index: Any, *args: Any, **kwargs: Any
) -> Tensor:
    """A `propagate` that makes simple messages over edges one sparse product."""
    if args or not _is_simple(layer, edge_index, kwargs):
        return old(layer, edge_index, *args, **kwargs)
    x, size, weight = kwargs["x"], kwargs.get("size"), kwargs.get("edge_weight")
    source, target = x if isinstance(x, tuple) else (x, x)
    n = source.shape[0]
    m = target.shape[0] if target is not None else n
    if size is not None:
        given_n, given_m = size
        n, m = given_n or n, given_m or m
    adjacency = EdgeAdjacency(edge_index, weight, (m, n))
    names = layer.inspector.get_param_names("message_and_aggregate")
    return layer.message_and_aggregate(adjacency, **{k: kwargs[k] for k in names})


def _is_simple(layer: Any, edge_index: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the layer's messages over these edges are a product with a sparse matrix."""
    x = kwargs.get("x")
    source = x[0] if isinstance(x, tuple) else x
    return (
        type(edge_index) is Tensor
        and edge_index.layout is torch.strided
        and isinstance(source, Tensor)
        and source.dim() == 2
        and source.is_floating_point()
        and kwargs.keys() <= {"x", "edge_weight", "size"}
        and _is_product(layer)
        and set(layer.inspector.get_param_names("message_and_aggregate")) <= kwargs.keys()
    )


@functools.cache
def _aggregation(name: str) -> type:
    """The type of a layer's default aggregation module."""
    from torch_geometric.nn.resolver import aggregation_resolver

    return type(aggregation_resolver(name))


def _is_product(layer: Any) -> bool:
    """Whether a layer's messages are features of neighbours, with a fused product of its own."""
    kind = type(layer)
    return (
        layer.fuse
        and layer.flow == "source_to_target"
        and layer.decomposed_layers == 1
        and not layer.explain
        and not any(getattr(layer, name) for name in HOOKS)
        and vars(layer).keys().isdisjoint(METHODS)
        and _are_equivalent(kind.message, kind.message_and_aggregate, kind.aggregate, kind.update)
        and type(layer.aggr_module) is _aggregation(layer.aggr)
        and not is_hooked(layer.aggr_module)
    )


@functools.lru_cache(256)  # asked in each call, of the few kinds of layers of a model
def _are_equivalent(message: Any, fused: Any, aggregate: Any, update: Any) -> bool:
    """Whether methods of a class, one of them fused, are PyG's own and make simple messages."""
    from torch_geometric.nn import MessagePassing

    return (
        all(f.__module__.startswith("torch_geometric.") for f in (message, fused))
        and aggregate is MessagePassing.aggregate
        and update is MessagePassing.update
        and {*inspect.signature(message).parameters} <= SIMPLE_MESSAGE
    )
