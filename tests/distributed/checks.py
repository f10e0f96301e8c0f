"""Checks of the processes of `team.py`; the first argument is their group.

All of them know the whole graph, which is drawn from one seed, and give a part of it.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from sparsetir import distributed, nn, ops
from sparsetir.data.graphs import load_graph
from sparsetir.distributed import DistGraph, DistributedError, parts
from sparsetir.distributed.exchange import Exchange

TOLERANCE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.float16: {"rtol": 2e-2, "atol": 2e-2},
    torch.bfloat16: {"rtol": 1e-1, "atol": 1e-1},
}
HEADS, FEAT = 2, 5


# -- graphs ---------------------------------------------------------------------------------------


def edges_of(kind: str) -> tuple[torch.Tensor, int]:
    """(2, E) edges and the number of nodes."""
    torch.manual_seed(1)
    random = torch.randint(0, 29, (2, 150))  # loops, parallel edges, and a node without any
    random[:, :5] = torch.tensor([[0, 1, 1, 2, 2], [0, 1, 1, 3, 3]])
    none, many = torch.empty(2, 0, dtype=torch.int64), torch.arange(20)
    return {
        "random": (random, 30),
        "no edges": (none, 6),
        "three nodes": (torch.tensor([[0, 1, 2, 2], [1, 2, 0, 2]]), 3),  # fewer than processes
        "one target": (torch.stack([many, 0 * many]), 20),
        "one source": (torch.stack([0 * many + 7, many]), 20),
        "no nodes": (none, 0),
    }[kind]


def share(group: Any, edges: int) -> torch.Tensor:
    """Numbers of the edges that this process gives: one gives none, others uneven parts."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(2)
    owner = torch.randint(0, size, (edges,)) * torch.randint(0, 2, (edges,))
    owner[owner == size - 1] = 0
    return (owner == rank).nonzero()[:, 0]


def partition_of(kind: str, nodes: int, group: Any) -> Any:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(3)
    parts = torch.randint(0, size, (nodes,))
    mine = torch.randperm(nodes)[rank::size]
    last = torch.full((nodes,), size - 1, dtype=torch.int32)  # all nodes on one process
    return {"given": parts, "shares": (mine, parts[mine]), "last": last}.get(kind, kind)


def spread(
    group: Any, kind: str = "random", partition: str = "rows", **options: Any
) -> tuple[DistGraph, torch.Tensor, int]:
    """The graph on these processes, the whole one's edges and nodes; edges know their numbers."""
    edges, nodes = edges_of(kind)
    mine = share(group, edges.shape[1])
    if "values" in options:
        options["values"] = options["values"][mine]
    graph = DistGraph.from_edges(
        edges[:, mine], nodes, edge_data={"number": mine}, group=group,
        partition=partition_of(partition, nodes, group), **options,
    )  # fmt: skip
    return graph, edges, nodes


def close(result: Any, wanted: Any, dtype: torch.dtype = torch.float64) -> None:
    torch.testing.assert_close(result, wanted, **TOLERANCE[dtype])


# -- graphs and rows ------------------------------------------------------------------------------


def test_edges_are_where_their_targets_are(group: Any, kind: str, partition: str) -> None:
    weights = torch.rand(edges_of(kind)[0].shape[1])
    graph, edges, nodes = spread(group, kind, partition, values=weights)
    assert (graph.num_nodes, graph.num_edges) == (nodes, edges.shape[1])
    number = graph.edge_data["number"]
    assert torch.equal(graph.values, weights[number])
    every = torch.zeros(nodes, dtype=torch.int64).index_add_(
        0, graph.nodes, torch.ones(graph.own, dtype=torch.int64)
    )
    dist.all_reduce(every, group=group)
    assert (every == 1).all() and (graph.nodes[1:] > graph.nodes[:-1]).all()
    # Sources by the numbers of nodes, which come as rows do.
    numbers = distributed.with_halo(graph, graph.nodes.double()).long()
    source, target = graph.edge_index.long()
    assert torch.equal(numbers[source], edges[0, number])
    assert torch.equal(graph.nodes[target], edges[1, number])
    assert (source[: len(graph.local.col)] < graph.own).all()
    assert (source[len(graph.local.col) :] >= graph.own).all()
    assert graph.halo == len(set(numbers[source].tolist()) - set(graph.nodes.tolist()))
    size = dist.get_world_size(group)
    if partition == "rows" and kind == "random":
        work = graph.nnz + graph.own
        most = 1 + int(torch.bincount(edges[1], minlength=nodes).max())
        assert work <= (edges.shape[1] + nodes) / size + most


def test_rows_there_and_back(group: Any, partition: str) -> None:
    graph, _, nodes = spread(group, partition=partition)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    last = size - 1
    x = torch.randn(nodes, 3, 2, dtype=torch.bfloat16)
    rows = graph.scatter(x if rank == last else None, source=last)
    assert torch.equal(rows, x[graph.nodes])
    whole = graph.gather(rows, to=last)
    assert torch.equal(whole, x) if rank == last else whole is None
    assert torch.equal(graph.gather(rows, to=None), x)
    flags = graph.gather(graph.nodes % 2 == 0, to=None)
    assert flags.tolist() == [i % 2 == 0 for i in range(nodes)]
    torch.manual_seed(5)
    some = torch.randperm(nodes)[rank::size]
    assert torch.equal(graph.arrange(some.int(), x[some]), rows)
    tensor = graph.to_dtensor(rows)
    assert tensor.shape == x.shape and torch.equal(tensor.full_tensor(), x)
    assert torch.equal(graph.from_dtensor(tensor), rows)


def test_coalesced(group: Any) -> None:
    edges, nodes = edges_of("random")
    mine = share(group, edges.shape[1])
    weights = torch.rand(edges.shape[1], dtype=torch.float64)
    for values in (None, weights):
        graph = DistGraph.from_edges(
            edges[:, mine], nodes, None if values is None else values[mine], group=group,
            coalesce=True,
        )  # fmt: skip
        ones = torch.ones(edges.shape[1], dtype=torch.float64) if values is None else values
        dense = torch.zeros(nodes, nodes, dtype=torch.float64)
        dense.index_put_((edges[1], edges[0]), ones, accumulate=True)
        assert graph.num_edges == len(dense.nonzero())
        eye = torch.eye(nodes, dtype=torch.float64)[graph.nodes]
        close(graph.gather(distributed.spmm(graph, eye), to=None), dense)
    once = edges.unique(dim=1)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    graph = DistGraph.from_edges(once[:, rank::size], group=group, coalesce=True)
    assert graph.values is None and graph.num_nodes == 29


def test_a_graph_of_a_file(group: Any, path: str) -> None:
    whole = load_graph(path)
    for partition in ("rows", "given"):
        how = partition_of(partition, whole.shape[0], group)
        graph = DistGraph.from_file(path, partition=how, group=group)
        assert (graph.num_nodes, graph.num_edges) == (whole.shape[0], whole.nnz)
        assert (graph.values is None) == bool((whole.data == 1).all())
        x = torch.randn(whole.shape[0], 3, dtype=torch.float64)
        product = graph.gather(graph @ x[graph.nodes], to=None)
        close(product, torch.from_numpy(whole.astype("float64") @ x.numpy()), torch.float32)


# -- products -------------------------------------------------------------------------------------


def alike(
    spread_out: Any, on_graph: Any, on_edges: Any, operands: list[tuple[Any, str]],
    result: str = "n", dtype: torch.dtype = torch.float64, near: Any = None,
) -> None:  # fmt: skip
    """A call gives on own rows what another gives on the whole graph, and the same gradients.

    spread_out : of :func:`spread`
    operands : whole tensors, each with "n" or "e" for rows of nodes or of edges, as of the result
    near : compares two tensors; by default within the dtype's tolerance
    """
    graph, edges, nodes = spread_out
    places = {"n": graph.nodes, "e": graph.edge_data["number"]}
    rows = [places[result], *(places[kind] for _, kind in operands)]
    mine = [x[index].requires_grad_() for (x, _), index in zip(operands, rows[1:], strict=True)]
    whole = [x.requires_grad_() for x, _ in operands]
    outs, wanted = on_graph(graph, *mine), on_edges((edges, nodes), *whole)
    weights = torch.randn_like(wanted)
    outs = [outs, *torch.autograd.grad((outs * weights[places[result]]).sum(), mine)]
    wanted = [wanted, *torch.autograd.grad((wanted * weights).sum(), whole)]
    for one, other, at in zip(outs, wanted, rows, strict=True):
        assert one.dtype == dtype
        (near or functools.partial(close, dtype=dtype))(one, other[at])


def test_spmm(
    group: Any, kind: str, reduce: str, dtype: torch.dtype, heads: str, partition: str = ""
) -> None:
    """heads : which operands have them"""
    partition = partition or ("rows", "given", "shares", "last")[len(kind + reduce + heads) % 4]
    graphs = spread(group, kind, partition)
    torch.manual_seed(4)
    operands = [(torch.randn((graphs[2], *[HEADS] * ("x" in heads), FEAT), dtype=dtype), "n")]
    if "no values" not in heads:
        shape = graphs[1].shape[1], *[HEADS] * ("values" in heads)
        operands.append((torch.randn(shape, dtype=dtype), "e"))
    calls = (lambda A, x, v=None, by=by: by.spmm(A, x, reduce, v) for by in (distributed, ops))
    alike(graphs, *calls, operands, dtype=dtype)


def test_sddmm(
    group: Any, kind: str, partition: str, dtype: torch.dtype, heads: bool, attention: bool = False
) -> None:
    """Or attention, whose values have fewer features than its keys."""
    graphs = spread(group, kind, partition)
    torch.manual_seed(4)
    operands = [
        (torch.randn(graphs[2], *[HEADS] * heads, feat, dtype=dtype), "n")
        for feat in (FEAT, FEAT, 3)[: 2 + attention]
    ]
    if attention:
        scale = None if heads else 0.3
        calls = (lambda A, *x, by=by: by.attention(A, *x, scale) for by in (distributed, ops))
        alike(graphs, *calls, operands, dtype=dtype)
    else:
        alike(graphs, distributed.sddmm, ops.sddmm, operands, "e", dtype)


def test_softmax(group: Any, kind: str) -> None:
    graphs = spread(group, kind, "given")
    values = torch.randn(graphs[1].shape[1], HEADS, dtype=torch.float64)
    alike(graphs, distributed.softmax, ops.sparse_softmax, [(values, "e")], "e")


def test_infinities_and_nan(group: Any) -> None:
    """Go where edges take them, and nowhere else."""
    graph, edges, nodes = spread(group, "random", "given")
    x = torch.randn(nodes, FEAT)
    x[4], x[5], x[29] = torch.inf, torch.nan, torch.nan
    for reduce in ("sum", "mean", "max", "min"):
        result = distributed.spmm(graph, x[graph.nodes], reduce)
        wanted = ops.spmm((edges, nodes), x, reduce)[graph.nodes]
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


# Each reduction with values and without, each kind of heads.
IN_PIECES = [
    *zip(("sum", "mean", "max", "min"), ("none", "x and values", "values", "no values")),
    ("max", "x and values"), ("min", "none"),
]  # fmt: skip


def test_in_pieces(group: Any, most: int) -> None:
    """Rows of other processes' edges a few at a time; some pieces have none of them."""
    sizes = parts.BLOCK_ROWS, parts.MAX_BLOCKS
    parts.BLOCK_ROWS, parts.MAX_BLOCKS = 3, most
    try:
        graph, _, _ = spread(group, "random", "given")
        rows = sum(piece.A.m for piece in graph.remote_blocks)
        assert 1 < len(graph.remote_blocks) <= most and rows <= graph.own
        for reduce, heads in IN_PIECES:
            test_spmm(group, "random", reduce, torch.float64, heads, "given")
        for attention in (False, True):
            test_sddmm(group, "random", "given", torch.float32, True, attention)
    finally:
        parts.BLOCK_ROWS, parts.MAX_BLOCKS = sizes


def test_gradients_of_halos_go_first(group: Any) -> None:
    """Exchanges overlap with the sums of own rows; and some gradients alone are right."""
    graph, *_ = spread(group, "random", "given")
    order: list[str] = []
    begin, transposed = Exchange.begin_gradients, parts.transposed

    def begun(*args: Any) -> Any:
        order.append("sent")
        return begin(*args)

    def computed(A: Any, *args: Any) -> Any:
        order.append("local" if A is graph.local else "remote")
        return transposed(A, *args)

    Exchange.begin_gradients, parts.transposed = begun, computed
    try:
        for call in (
            lambda x, y: distributed.spmm(graph, y) * x,
            lambda x, y: distributed.spmm(graph, y, "mean", distributed.sddmm(graph, x, y)),
            lambda x, y: distributed.sddmm(graph, x, y),
            lambda x, y: distributed.attention(graph, x, y, x),
        ):
            x, y = torch.randn(2, graph.own, FEAT, dtype=torch.float64).requires_grad_()
            order.clear()
            wanted = torch.autograd.grad(call(x, y).square().sum(), (x, y))
            assert order[-3:] == ["remote", "sent", "local"], order
            for n, one in enumerate((x, y)):
                others = [z if z is one else z.detach() for z in (x, y)]
                for given_ in (others, (x, y)):  # the other takes none; has an unused one
                    (grad,) = torch.autograd.grad(call(*given_).square().sum(), one)
                    close(grad, wanted[n])
    finally:
        Exchange.begin_gradients, parts.transposed = begin, transposed


def test_gradients_that_others_have_stay(group: Any) -> None:
    """The result of own rows, to which those of halos are added, is not written to."""
    graph, *_ = spread(group, "random", "given")
    for call in (distributed.spmm, distributed.with_halo):
        x = torch.randn(graph.own, FEAT, requires_grad=True)
        out, nodes, held = call(graph, x), [], []
        nodes.append(out.grad_fn)
        for node in nodes:
            nodes += [n for n, _ in node.next_functions if n is not None and n not in nodes]
        (leave,) = [n for n in nodes if type(n).__name__ == "_SendBackward"]
        leave.register_prehook(lambda grads: held.append((grads[0], grads[0].clone())))
        out.square().sum().backward()
        ((kept, before),) = held
        close(kept, before)
        lost = torch.tensor([int(not torch.equal(x.grad, before))])
        dist.all_reduce(lost, group=group)
        assert int(lost)  # of some process there is more


def test_bytes(group: Any) -> None:
    """Only necessary bytes are sent: a row for each node and process that needs it, once."""
    graph, edges, nodes = spread(group, "random", "given")
    x = torch.randn(graph.own, FEAT, requires_grad=True)
    halo = torch.tensor([graph.halo])
    dist.all_reduce(halo, group=group)

    def sent(graph: DistGraph) -> int:
        before = graph.exchange.bytes_sent
        distributed.spmm(graph, x).sum().backward()
        total = torch.tensor([graph.exchange.bytes_sent - before])
        dist.all_reduce(total, group=group)
        return int(total)

    assert sent(graph) == 2 * 4 * FEAT * int(halo) > 0  # there and back
    for dtype in (torch.float16, torch.bfloat16):
        assert sent(graph.exchanging(dtype)) == 2 * 2 * FEAT * int(halo)


def test_exchange_in_16_bits(group: Any, dtype: torch.dtype) -> None:
    graph, edges, nodes = spread(group, "random", "given")
    half = graph.exchanging(dtype)
    assert graph.exchange_dtype is None and half.exchange_dtype == dtype

    def near(one: torch.Tensor, other: torch.Tensor) -> None:
        bound = {torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype] * other.abs().max()
        assert (one - other).abs().max() <= 8 * bound

    x = torch.randn(nodes, FEAT)
    with torch.autocast("cpu", dtype):
        result = distributed.spmm(graph, x[graph.nodes])
    assert result.dtype == dtype
    close(result, ops.spmm((edges, nodes), x).to(dtype)[graph.nodes], torch.bfloat16)
    for call in (
        lambda by, A, x: by.spmm(A, x),
        lambda by, A, x: by.spmm(A, x, values=by.sddmm(A, x, x)),
        lambda by, A, x: by.attention(A, x, x, x),
        lambda by, A, x: by.spmm(A, x, "max"),
    ):
        alike(
            (half, edges, nodes), functools.partial(call, distributed),
            functools.partial(call, ops), [(x, "n")], dtype=torch.float32, near=near,
        )  # fmt: skip


# -- layers and training --------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Two layers."""

    def __init__(self, kind: str, features: int, classes: int) -> None:
        super().__init__()
        first, second = {
            "sage": lambda: (nn.SAGEConv(features, 16), nn.SAGEConv(16, classes)),
            "gat": lambda: (nn.GATConv(features, 4, 4), nn.GATConv(16, classes)),
            "gcn": lambda: (nn.GCNConv(features, 16), nn.GCNConv(16, classes)),
        }[kind]()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor, graph: Any) -> torch.Tensor:
        return self.second(F.elu(self.first(x, graph)), graph)


def trained(model: Any, x: Any, graph: Any, train: Any, loss_of: Any, epochs: int) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = loss_of(model(x, graph)[train])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_losses(
    group: Any, kind: str, partition: str, edges_kind: str = "random", epochs: int = 50
) -> list[float]:
    """Losses of processes, on own rows, with torch's DistributedDataParallel, and of one alone.

    On a small graph, of which processes may have nothing, or on one of a file; the latter in
    float64, as rounding grows while weights change.
    """
    small = edges_kind != "cora"
    if small:
        graph, edges, nodes = spread(group, edges_kind, partition)
    else:
        whole = load_graph(edges_kind)
        nodes, (target, source) = whole.shape[0], whole.nonzero()
        edges = torch.from_numpy(np.stack([source, target]).astype(np.int64))
        graph = DistGraph.from_file(edges_kind, group=group)
    torch.manual_seed(6)
    dtype, features = (torch.float32, 8) if small else (torch.float64, 32)
    x, y = torch.randn(nodes, features, dtype=dtype), torch.randint(0, 3, (nodes,))
    train, mine = torch.rand(nodes) < 0.5, graph.nodes
    train[-1] = True  # one at least

    def model() -> Model:
        torch.manual_seed(0)
        return Model(kind, features, int(y.max()) + 1).to(dtype)

    def loss_of(out: torch.Tensor) -> torch.Tensor:
        labels = y[mine][train[mine]]
        return distributed.mean(F.cross_entropy(out, labels, reduction="none"), group)

    together = DistributedDataParallel(model(), process_group=group)
    losses = trained(together, x[mine], graph, train[mine], loss_of, epochs)
    if dist.get_rank(group) == 0:  # all processes find the same, as their caller sees
        alone = lambda out: F.cross_entropy(out, y[train])  # noqa: E731
        wanted = trained(model(), x, edges, train, alone, epochs)
        np.testing.assert_allclose(losses, wanted, rtol=2e-4 if small else 1e-7)
    assert losses[-1] < (0.7 if epochs == 50 and small else 1) * losses[0]
    dist.barrier(group)
    return losses


LAYERS = {
    "gcn": lambda: nn.GCNConv(FEAT, 3),
    "gcn, 9": lambda: nn.GCNConv(FEAT, 9, improved=True),
    "gcn, not normalised": lambda: nn.GCNConv(FEAT, 3, normalize=False),
    "gcn, kept": lambda: nn.GCNConv(FEAT, 9, cached=True),
    "sage": lambda: nn.SAGEConv(FEAT, 3, normalize=True),
    "sage, 9": lambda: nn.SAGEConv(FEAT, 9, aggr="sum", project=True),
    "sage, max": lambda: nn.SAGEConv(FEAT, 3, aggr="max"),
    "sage, several": lambda: nn.SAGEConv(FEAT, 3, aggr=["mean", "min", "sum"]),
    "gat": lambda: nn.GATConv(FEAT, 3, heads=2),
    "gat, no loops": lambda: nn.GATConv(FEAT, 3, add_self_loops=False, concat=False, heads=2),
    "gat, edges": lambda: nn.GATConv(FEAT, 3, heads=2, edge_dim=2),
    "rgcn": lambda: nn.RGCNConv(FEAT, 3, 4),
    "rgcn, bases": lambda: nn.RGCNConv(FEAT, 9, 4, num_bases=2, aggr="sum"),
    "rgcn, max": lambda: nn.RGCNConv(FEAT, 3, 4, aggr="max"),
    "rgcn, rows": lambda: nn.RGCNConv(30, 3, 4),
}


def test_layers(group: Any, kinds: str, weighted: bool) -> None:
    """Each kind of graph gives the results of edges, and the gradients."""
    weight = torch.rand(150, dtype=torch.float64) + 0.5
    attr = torch.randn(150, 2, dtype=torch.float64)
    relations = torch.randint(0, 4, (150,))
    graph, edges, nodes = spread(group, "random", "given")
    number, mine = graph.edge_data["number"], graph.nodes
    whole = torch.randn(nodes, FEAT, dtype=torch.float64)
    for name, make in LAYERS.items():
        if name.split(",")[0] not in kinds.split():
            continue
        layer = make().double()
        results = []
        for pattern, x in ((graph, whole[mine]), ((edges), whole)):
            x = x.clone().requires_grad_()
            more: list[Any] = []
            mine_of = number if pattern is graph else slice(None)
            if name == "gat, edges":
                more = [attr[mine_of]]
            elif name.startswith("rgcn"):
                more = [relations[mine_of]]
            elif weighted and name.startswith("gcn"):
                more = [weight[mine_of].clone().requires_grad_()]
            layer.zero_grad()
            for _ in range(2):  # the second uses what was kept
                out = layer(None if name == "rgcn, rows" else x, pattern, *more)
            grad = torch.linspace(-1, 2, nodes * out.shape[1], dtype=torch.float64).view(nodes, -1)
            (out * (grad[mine] if pattern is graph else grad)).sum().backward()
            gradients = [p.grad.clone() for p in layer.parameters()]
            if pattern is graph:
                for g in gradients:
                    dist.all_reduce(g, group=group)
            x.grad = torch.zeros_like(x) if name == "rgcn, rows" else x.grad
            leaves = [x, *(m for m in more if m.requires_grad and name != "gcn, kept")]
            results.append((out, gradients, [leaf.grad for leaf in leaves]))
            if isinstance(layer, nn.GCNConv):
                layer._cached = None
        (out, gradients, leaves), wanted = results
        close(out, wanted[0][mine])
        close(gradients, wanted[1])
        close(leaves[0], wanted[2][0][mine])
        if len(leaves) > 1:
            close(leaves[1], wanted[2][1][number])


def test_what_layers_give(group: Any) -> None:
    """Weights of attention; sums with the graph's own weights."""
    weight = torch.rand(150, dtype=torch.float64) + 0.5
    graph, edges, nodes = spread(group, "random", "given")
    mine, whole = graph.nodes, torch.randn(nodes, FEAT, dtype=torch.float64)
    pairs = nn.GATConv(FEAT, 3, heads=2).double()
    out, (edge_index, alpha) = pairs(whole[mine], graph, return_attention_weights=True)
    assert edge_index.shape[1] == len(alpha) and alpha.shape[1] == 2
    sums = torch.zeros(graph.own, 2, dtype=torch.float64).index_add(0, edge_index[1].long(), alpha)
    close(sums, torch.ones_like(sums))
    with_values, *_ = spread(group, "random", "given", values=weight)
    A = torch.sparse_coo_tensor(edges.flip(0), weight, (nodes, nodes))
    close(distributed.spmm(with_values, whole[mine]), ops.spmm(A, whole)[mine])
    sage = nn.SAGEConv(FEAT, 3).double()
    assert sage(whole[mine], with_values).shape == (graph.own, 3)


# -- checkpoints ----------------------------------------------------------------------------------


def _state(group: Any, graph: DistGraph, rows: torch.Tensor, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Model("sage", 8, 3)
    return model, {"model": model.state_dict(), "rows": graph.to_dtensor(rows)}


def save_checkpoint(group: Any, path: str) -> None:
    graph, _, nodes = spread(group, "random", "given")
    whole = torch.arange(nodes * 4.0).view(nodes, 4)
    _, state = _state(group, graph, whole[graph.nodes], 7)
    dcp.save(state, checkpoint_id=path, process_group=group)


def load_checkpoint(group: Any, path: str, partition: str) -> None:
    graph, _, nodes = spread(group, "random", partition)
    model, state = _state(group, graph, torch.zeros(graph.own, 4), 8)
    dcp.load(state, checkpoint_id=path, process_group=group)
    model.load_state_dict(state["model"])
    whole = torch.arange(nodes * 4.0).view(nodes, 4)
    assert torch.equal(graph.from_dtensor(state["rows"]), whole[graph.nodes])
    torch.manual_seed(7)
    for mine, saved in zip(model.parameters(), Model("sage", 8, 3).parameters(), strict=True):
        assert torch.equal(mine, saved)


# -- what goes wrong ------------------------------------------------------------------------------


def message(error: type[Exception], call: Any) -> str:
    try:
        call()
    except error as caught:
        return str(caught)
    raise AssertionError(f"expected {error.__name__}")


def test_wrong_on_one_process(group: Any) -> list[tuple[str, str]]:
    """All processes get an error, and go on together afterwards: what was to be said, and is."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    here = rank == size - 1
    edges, nodes = edges_of("random")
    graph, *_ = spread(group)
    x, ones = torch.ones(graph.own, 3), torch.ones(150)
    short = graph.nodes[: -1 if here else None]
    same, ints = "expected the same on all processes", torch.arange(30)

    def build(edge_index: Any = edges, **options: Any) -> Any:
        return lambda: DistGraph.from_edges(edge_index, group=group, **options)

    def by(partition: Any) -> Any:
        return build(partition=partition, num_nodes=30)

    def spmm(x: Any, *more: Any, **options: Any) -> Any:
        return lambda: distributed.spmm(graph, x, *more, **options)

    calls = {
        build(edges.float() if here else edges): "expected int32 or int64, got float32",
        build(edges[0] if here else edges): "expected shape (2, E), got (150,)",
        build(edges - (1 if here else 0)): "expected nodes from 0 to",
        build(num_nodes=29 if here else 30): same,
        build(num_nodes=-1 if here else 30): "expected 0 or more",
        build(values=ones[: 3 if here else None]): "expected shape (150,), got (3,)",
        build(values=ones.double() if here else ones): same,
        build(partition="columns" if here else "rows"): "expected 'rows', 'metis', a tensor",
        by(0 * ints[: 29 if here else 30]): "expected shape (30,), a process for each node",
        by(0 * ints + (99 if here else 0)): "expected processes from 0 to 3, got 99 to 99",
        by(ints // 15 * int(here)): same,
        by((ints, 0 * ints)): "expected each node once",
        build(exchange_dtype=torch.int8 if here else None): "expected torch.float16, torch.bfloat1",
        build(edge_data={"a": ones[: 2 if here else None]}): "expected shape (150, ...), got (2,)",
        lambda: DistGraph.from_file("missing.npz" if here else "cora", group=group):
            "missing.npz: no such file",
        spmm(x[:-1] if here else x): "a row for each own node, got",
        spmm(torch.ones(graph.own, 4) if here else x): "expected the same on all",
        spmm(x.double() if here else x): "expected the same on all",
        spmm(x, "mean" if here else "sum"): "expected the same on all",
        spmm(x, values=torch.ones(1 if here else graph.nnz)): "a number for each own edge",
        lambda: distributed.sddmm(graph, x, x[:, :2] if here else x): "as 'X', got",
        lambda: distributed.attention(graph, x, x.int() if here else x, x):
            "argument 'k': expected float32",
        lambda: distributed.with_halo(graph, x.tolist() if here else x):
            "argument 'x': expected a tensor",
        lambda: graph.scatter(torch.ones(30 if rank == 0 else 3) if here or rank == 0 else None):
            "argument 'x': expected",
        lambda: graph.gather(x[:1] if here else x): "argument 'x': expected",
        lambda: graph.arrange(short, x[: len(short)]): "expected each node once",
        by((graph.nodes, short * 0)): "expected a pair of nodes and their processes, of one length",
    }  # fmt: skip
    messages = []
    for call, expected in calls.items():
        try:
            call()
        except (TypeError, ValueError, DistributedError) as error:
            messages.append((expected, f"{type(error).__name__}: {error}"))
        else:
            messages.append((expected, "it has gone well"))
    assert distributed.spmm(graph, x).shape == x.shape  # all are where they were
    return messages


def test_layers_refuse(group: Any) -> tuple[str, str]:
    graph, *_ = spread(group)
    layer = nn.SAGEConv(FEAT, 3, flow="target_to_source")
    flow = message(ValueError, lambda: layer(torch.ones(graph.own, FEAT), graph))
    return flow, message(ValueError, lambda: nn.SAGEConv(FEAT, 3)(torch.ones(99, FEAT), graph))


def test_metis(group: Any) -> None:
    """Two rings, of nodes in any order: each on two of four processes, with few edges between."""
    ring = torch.stack([torch.arange(32), torch.arange(1, 33) % 32])
    both = torch.cat([ring, ring + 32], 1)
    edges = torch.randperm(64)[torch.cat([both, both.flip(0)], 1)]
    mine = share(group, edges.shape[1])
    graph = DistGraph.from_edges(edges[:, mine], 64, partition="metis", group=group)
    assert 12 <= graph.own <= 20 and graph.halo <= 4
    x = torch.randn(64, FEAT, dtype=torch.float64)
    close(distributed.spmm(graph, x[graph.nodes]), ops.spmm((edges, 64), x)[graph.nodes])


def test_without_metis(group: Any) -> str:
    edges, nodes = edges_of("random")
    return message(
        ImportError, lambda: DistGraph.from_edges(edges, nodes, partition="metis", group=group)
    )


def test_twice_differentiated(group: Any) -> str:
    graph, *_ = spread(group)
    x = torch.ones(graph.own, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(distributed.spmm(graph, x).square().sum(), x, create_graph=True)
    return message(RuntimeError, lambda: grad.sum().backward())


def test_compiled(group: Any, kind: str) -> str:
    """Code between operators on a graph is compiled; returns the message for one whole graph."""
    graph, *_ = spread(group)
    model, x = Model(kind, FEAT, 3), torch.randn(graph.own, FEAT)
    results = []
    for call in (model, torch.compile(model, backend="eager")):
        leaf = x.clone().requires_grad_()
        out = call(leaf, graph)
        (grad,) = torch.autograd.grad(out.square().sum(), leaf)
        results.append((out, grad))
    for one, other in zip(*results, strict=True):
        close(one, other, torch.float32)
    whole = torch.compile(model, backend="eager", fullgraph=True)
    text = message(RuntimeError, lambda: whole(x, graph))
    torch._dynamo.reset()
    return text


class Own(torch.nn.Module):
    """Three layers of gated sums in raw torch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [FEAT, width, width, 3]
        self.layers = torch.nn.ModuleList(map(torch.nn.Linear, sizes, sizes[1:]))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        for layer in self.layers:
            h = layer(x).tanh()
            weight = torch.sigmoid((h[source] * h[target]).mean(-1, keepdim=True))
            x = torch.zeros_like(h).index_add(0, target, weight * h[source])
        return x


def test_data_parallel(group: Any, width: int) -> list[int]:
    """A compiled model under DDP, each process with its own edges; gives the regions of graphs."""
    from sparsetir.graph.backend import Backend

    edges, nodes = edges_of("random")
    mine = edges[:, dist.get_rank(group) :: 2]
    x, backend, results = torch.randn(nodes, FEAT), Backend(), []
    for compiles in (False, True):
        torch.manual_seed(1)
        model = DistributedDataParallel(Own(width), process_group=group, bucket_cap_mb=1)
        call = torch.compile(model, backend=backend) if compiles else model
        adam = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(3):
            adam.zero_grad()
            out = call(x, mine)
            out.square().mean().backward()
            results.append([out, *(p.grad.clone() for p in model.parameters())])
            adam.step()
    for result, wanted in zip(results[3:], results[:3], strict=True):
        for one, other in zip(result, wanted, strict=True):
            close(one, other, torch.float32)
    torch._dynamo.reset()
    return [len(graph.found) for graph in backend.graphs]


def test_wrong_later(group: Any) -> str:
    """New arguments are compared after any number of calls."""
    graph, *_ = spread(group)
    for _ in range(20):
        distributed.spmm(graph, torch.ones(graph.own, 3))
    feat = 5 if dist.get_rank(group) == 1 else 4
    text = message(DistributedError, lambda: distributed.spmm(graph, torch.ones(graph.own, feat)))
    assert distributed.spmm(graph, torch.ones(graph.own, 3)).shape == (graph.own, 3)
    return text


def fails_alone(group: Any, how: str, where: str) -> tuple[str, float]:
    """Train; process 1 ends, is stopped, raises, or does something else. What others see.

    where : "forward", or "backward", while others are in the midst of it
    """
    graph, *_ = spread(group)
    model = DistributedDataParallel(nn.SAGEConv(FEAT, 3), process_group=group)
    x = torch.ones(graph.own, FEAT, requires_grad=True)

    def fail(_: Any = None) -> None:
        if how in ("killed", "stopped"):
            os.kill(os.getpid(), 9 if how == "killed" else 19)
        elif how == "raises":
            raise ValueError("process 1 has had enough")
        else:
            distributed.spmm(graph, torch.ones(graph.own, FEAT + 1))

    start = time.monotonic()
    try:
        for epoch in range(50):
            fails = epoch == 20 and dist.get_rank(group) == 1
            start = time.monotonic()
            if fails and where == "forward":
                fail()
            out = model(x, graph)
            if fails:
                out.register_hook(fail)
            out.sum().backward()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    raise AssertionError("expected an error")
