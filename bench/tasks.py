"""Models of PyG's list of examples, from the papers, with their tasks: data, loss, score.

Nodes of Cora are classified on the Planetoid split, or its edges predicted; relations and batches
of graphs are generated. A task is run by `call`, its module or its compiled version.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Module
from torch_geometric.utils import negative_sampling

from sparsetir.datasets import load_cora_dataset

Call = Callable[..., Any]
WORDS, CLASSES = 1433, 7  # of Cora


@dataclass
class Cora:
    """Words of each paper, divided by their sum, its class, and the edges."""

    x: Tensor
    y: Tensor
    edges: Tensor
    train: Tensor
    test: Tensor


@cache
def cora() -> Cora:
    dataset = load_cora_dataset()
    x, ends = torch.from_numpy(dataset.features.toarray()), dataset.graph.tocoo()
    edges = torch.stack([torch.from_numpy(a).long() for a in (ends.col, ends.row)])
    y, train, test = (torch.from_numpy(a) for a in (dataset.labels, dataset.train, dataset.test))
    return Cora(x / x.sum(1, keepdim=True).clamp(min=1), y, edges, train, test)


# -- models ---------------------------------------------------------------------------------------


class Layers(Module):
    """Layers with dropout before each, an activation after all but the last, and classes."""

    def __init__(self, *layers: Module, dropout: float = 0.5, act: Any = F.relu) -> None:
        super().__init__()
        self.layers, self.dropout, self.act = torch.nn.ModuleList(layers), dropout, act

    def forward(self, x: Tensor, *edges: Tensor) -> Tensor:
        for n, layer in enumerate(self.layers):
            x = F.dropout(x, self.dropout, self.training)
            x = layer(x) if isinstance(layer, torch.nn.Linear) else layer(x, *edges)
            x = x if n + 1 == len(self.layers) else self.act(x)
        return F.log_softmax(x, -1)


class Appnp(Layers):
    """A network on nodes, whose classes are then propagated."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(WORDS, 64), torch.nn.Linear(64, CLASSES))
        self.propagation = pyg.APPNP(K=10, alpha=0.1)

    def forward(self, x: Tensor, *edges: Tensor) -> Tensor:
        for n, layer in enumerate(self.layers):
            x = layer(F.dropout(x, self.dropout, self.training))
            x = x if n else x.relu()
        return F.log_softmax(self.propagation(x, *edges), -1)


class Agnn(Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(WORDS, 16), torch.nn.Linear(16, CLASSES)
        self.one, self.two = pyg.AGNNConv(requires_grad=False), pyg.AGNNConv()

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.first(F.dropout(x, training=self.training)).relu()
        x = F.dropout(self.two(self.one(x, edges), edges), training=self.training)
        return F.log_softmax(self.last(x), -1)


class Gcn2(Module):
    """GCNII, whose layers see the first features again."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(WORDS, width), torch.nn.Linear(width, CLASSES)
        make = lambda n: pyg.GCN2Conv(width, 0.1, 0.5, n + 1)  # noqa: E731
        self.layers = torch.nn.ModuleList(map(make, range(depth)))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = first = self.first(F.dropout(x, 0.6, self.training)).relu()
        for layer in self.layers:
            x = layer(F.dropout(x, 0.6, self.training), first, edges).relu()
        return F.log_softmax(self.last(F.dropout(x, 0.6, self.training)), -1)


class Dna(Module):
    """Layers that attend to the results of all earlier layers."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(WORDS, width), torch.nn.Linear(width, CLASSES)
        make = lambda _: pyg.DNAConv(width, 8, dropout=0.8)  # noqa: E731
        self.layers = torch.nn.ModuleList(map(make, range(depth)))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = F.dropout(self.first(x).relu(), training=self.training)
        every = x[:, None]
        for layer in self.layers:
            every = torch.cat([every, layer(every, edges).relu()[:, None]], 1)
        x = F.dropout(every[:, -1], training=self.training)
        return F.log_softmax(self.last(x), -1)


class SuperGat(Layers):
    """Two layers, and a loss for edges that attention does not distinguish from others."""

    def __init__(self) -> None:
        more = {"attention_type": "MX", "edge_sample_ratio": 0.8, "is_undirected": True}
        first = pyg.SuperGATConv(WORDS, 8, 8, dropout=0.6, **more)
        last = pyg.SuperGATConv(64, CLASSES, 8, concat=False, dropout=0.6, **more)
        super().__init__(first, last, dropout=0.6, act=F.elu)

    def forward(self, x: Tensor, *edges: Tensor) -> Any:
        result = super().forward(x, *edges)
        if not self.training:
            return result
        layers: Any = self.layers
        return result, sum(layer.get_attention_loss() for layer in layers)


class Infomax(Module):
    """Deep Graph Infomax: nodes of the graph, and nodes with permuted words."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.layer, self.act = pyg.GCNConv(WORDS, width), torch.nn.PReLU(width)
        self.tells = torch.nn.Parameter(
            torch.empty(width, width).uniform_(-(width**-0.5), width**-0.5)
        )

    def encoded(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.act(self.layer(x, edges))

    def forward(self, x: Tensor, edges: Tensor) -> Any:
        real = self.encoded(x, edges)
        if not self.training:
            return real
        other = self.encoded(x[torch.randperm(len(x))], edges)
        summary = self.tells @ real.mean(0).sigmoid()
        return F.softplus(-(real @ summary)).mean() + F.softplus(other @ summary).mean()


class Relations(Module):
    """RGCN without features."""

    def __init__(self, nodes: int, relations: int, classes: int) -> None:
        super().__init__()
        self.first = pyg.RGCNConv(nodes, 16, relations, num_bases=4)
        self.second = pyg.RGCNConv(16, classes, relations, num_bases=4)

    def forward(self, edges: Tensor, kinds: Tensor) -> Tensor:
        return F.log_softmax(self.second(self.first(None, edges, kinds).relu(), edges, kinds), -1)


class Graphs(Module):
    """GIN on graphs in a batch."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.net = pyg.GIN(inputs, width, 3)
        self.last = pyg.MLP([width, width, classes], norm=None, dropout=0.5)

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor, size: int) -> Tensor:
        return self.last(pyg.global_add_pool(self.net(x, edges), batch, size))


# -- tasks ----------------------------------------------------------------------------------------


class Task:
    """A model and its task: the loss of a step, and a score of the current model."""

    def __init__(self, net: Module) -> None:
        self.net = net

    def loss(self, call: Call) -> Tensor:
        result = call(cora().x, cora().edges)
        loss = 0.0
        if isinstance(result, tuple):
            result, loss = result[0], 4 * result[1]  # the loss of SuperGAT's attention
        return loss + F.nll_loss(result[cora().train], cora().y[cora().train])

    def score(self, call: Call) -> float:
        right = call(cora().x, cora().edges).argmax(-1) == cora().y
        return float(right[cora().test].float().mean())


class Links(Task):
    """Link prediction on Cora: a graph of 85 % of its edges, and the others to be predicted."""

    def __init__(self, net: Module) -> None:
        super().__init__(net)
        ends = cora().edges[:, cora().edges[0] < cora().edges[1]]
        order = torch.randperm(ends.shape[1], generator=torch.Generator().manual_seed(0))
        kept, self.hidden = ends[:, order].tensor_split([ends.shape[1] * 85 // 100], 1)
        self.edges = torch.cat([kept, kept.flip(0)], 1)

    def scores(self, call: Call, edges: Tensor) -> list[Tensor]:
        z, n = call(cora().x, self.edges), edges.shape[1]
        others = negative_sampling(cora().edges, len(z), n)
        return [(z[a] * z[b]).sum(-1) for a, b in (edges, others)]

    def loss(self, call: Call) -> Tensor:
        linked, others = self.scores(call, self.edges)
        return F.softplus(-linked).mean() + F.softplus(others).mean()

    def score(self, call: Call) -> float:
        """The area under the curve."""
        from scipy.stats import rankdata  # its import takes seconds

        linked, others = self.scores(call, self.hidden)
        ranks, n = rankdata(torch.cat([linked, others]).numpy())[: len(linked)], len(linked)
        return float(ranks.mean() - (n + 1) / 2) / len(others)


class Unsupervised(Task):
    """A task without classes, judged by a linear model of the learnt features."""

    def loss(self, call: Call) -> Tensor:
        return call(cora().x, cora().edges)

    def score(self, call: Call) -> float:
        z = call(cora().x, cora().edges).detach()
        with torch.enable_grad():
            linear = torch.nn.Linear(z.shape[1], CLASSES)
            adam = torch.optim.Adam(linear.parameters(), 0.01)
            for _ in range(100):
                adam.zero_grad()
                F.cross_entropy(linear(z)[cora().train], cora().y[cora().train]).backward()
                adam.step()
        return super().score(lambda *_: linear(z))


class Kinds(Task):
    """Classes of nodes that only the relations of their edges determine: from c, relation r leads
    to c + r, four times out of five."""

    nodes, count, classes, known = 2_000, 12_000, 4, 400

    def __init__(self, net: Callable[[int, int, int], Module]) -> None:
        super().__init__(net(self.nodes, self.classes, self.classes))
        rng = torch.Generator().manual_seed(0)
        draw = lambda high, *n: torch.randint(0, high, n, generator=rng)  # noqa: E731
        self.y = torch.arange(self.nodes) % self.classes
        source, self.kinds = draw(self.nodes, self.count), draw(self.classes, self.count)
        other = torch.rand(self.count, generator=rng) < 0.2
        to = self.y[source] + self.kinds + other * draw(self.classes, self.count)
        target = draw(self.nodes // self.classes, self.count) * self.classes + to % self.classes
        self.edges = torch.stack([source, target])

    def loss(self, call: Call) -> Tensor:
        return F.nll_loss(call(self.edges, self.kinds)[: self.known], self.y[: self.known])

    def score(self, call: Call) -> float:
        right = call(self.edges, self.kinds).argmax(-1) == self.y
        return float(right[self.known :].float().mean())


class Batches(Task):
    """Graphs, new in each step: random ones, rings with chords, and connected stars."""

    inputs, classes, size = 8, 3, 64

    def __init__(self, net: Callable[[int, int, int], Module]) -> None:
        super().__init__(net(self.inputs, 32, self.classes))

    def drawn(self, rng: torch.Generator | None = None) -> tuple[list[Any], Tensor]:
        kinds, edges, batch, first = torch.randint(0, 3, (self.size,), generator=rng), [], [], 0
        for number, kind in enumerate(kinds.tolist()):
            n = int(torch.randint(12, 25, (), generator=rng))
            nodes, more = torch.arange(n), torch.randint(0, n, (2, n // 2), generator=rng)
            some = torch.randint(0, n, (2, n), generator=rng)
            ring = torch.stack([nodes, (nodes + 1) % n])
            star = torch.stack([nodes, nodes % 3])
            edges.append(torch.cat([(some, ring, star)[kind], more], 1) + first)
            batch.append(torch.full((n,), number))
            first += n
        both = torch.cat(edges, 1)
        both = torch.cat([both, both.flip(0)], 1)
        degrees = torch.bincount(both[1], minlength=first).clamp(max=self.inputs - 1)
        x = F.one_hot(degrees, self.inputs).float()
        return [x, both, torch.cat(batch), self.size], kinds

    def loss(self, call: Call) -> Tensor:
        args, kinds = self.drawn()
        return F.cross_entropy(call(*args), kinds)

    def score(self, call: Call) -> float:
        rng, shares = torch.Generator().manual_seed(0), []
        for _ in range(4):
            args, kinds = self.drawn(rng)
            shares.append((call(*args).argmax(-1) == kinds).float().mean())
        return float(torch.stack(shares).mean())


@dataclass(frozen=True)
class Example:
    """The construction and the training of a task."""

    make: Callable[[], Task]
    rate: float = 0.01
    decay: float = 5e-4
    epochs: int = 100


def _two(layer: Any, *args: Any, width: int = 16, **more: Any) -> Callable[[], Task]:
    """Two layers from words to classes."""
    return lambda: Task(
        Layers(layer(WORDS, width, *args, **more), layer(width, CLASSES, *args, **more))
    )


def _heads(layer: Any) -> Callable[[], Task]:
    """Two layers of attention."""
    last = {"concat": False, "dropout": 0.6}
    layers = lambda: (layer(WORDS, 8, 8, dropout=0.6), layer(64, CLASSES, 1, **last))  # noqa: E731
    return lambda: Task(Layers(*layers(), dropout=0.6, act=F.elu))


def _arma() -> Task:
    layer = lambda a, b, act: pyg.ARMAConv(a, b, 3, 2, True, act, dropout=0.25)  # noqa: E731
    return Task(Layers(layer(WORDS, 16, F.relu), layer(16, CLASSES, None)))


EXAMPLES: dict[str, Example] = {
    "GCN": Example(_two(pyg.GCNConv)),
    "ChebNet": Example(_two(pyg.ChebConv, 2)),
    "GraphSAGE": Example(_two(pyg.SAGEConv, width=64)),
    "GAT": Example(_heads(pyg.GATConv), rate=0.005),
    "GATv2": Example(_heads(pyg.GATv2Conv), rate=0.005),
    "SuperGAT": Example(lambda: Task(SuperGat()), rate=0.005),
    "SGC": Example(lambda: Task(Layers(pyg.SGConv(WORDS, CLASSES, 2), dropout=0.0)), 0.2, 5e-3),
    "APPNP": Example(lambda: Task(Appnp())),
    "ARMA": Example(_arma),
    "TAGCN": Example(_two(pyg.TAGConv)),
    "AGNN": Example(lambda: Task(Agnn())),
    "GCNII": Example(lambda: Task(Gcn2(64, 16))),
    "DNA": Example(lambda: Task(Dna()), rate=0.005),
    "jumping knowledge": Example(
        lambda: Task(Layers(pyg.GCN(WORDS, 16, 3, CLASSES, dropout=0.5, jk="cat"), dropout=0.0))
    ),
    "MixHop": Example(
        lambda: Task(
            Layers(
                pyg.MixHopConv(WORDS, 60),
                pyg.MixHopConv(180, CLASSES),
                torch.nn.Linear(3 * CLASSES, CLASSES),
            )
        )
    ),
    "autoencoder": Example(lambda: Links(pyg.GCN(WORDS, 32, 2, 16)), decay=0.0),
    "infomax": Example(lambda: Unsupervised(Infomax()), 0.001, 0.0),
    "RGCN": Example(lambda: Kinds(Relations), epochs=50),
    "GIN, batches": Example(lambda: Batches(Graphs), 0.005, 0.0),
}
