"""PyG's models, pools and layers through the backend, against eager; models trained and not."""

import itertools

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as pyg
from torch.nn import Linear as linear
from torch.utils._pytree import tree_leaves
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data
from torch_geometric.nn import models as nets
from torch_geometric.nn.models import dimenet, gnnff, schnet, tgn, visnet
from torch_geometric.utils import dropout_edge

from graph_models import edges

NODES, EDGES, F, H, OUT = 40, 200, 16, 12, 8
E = edges(1, NODES, EDGES)
TYPES = torch.arange(NODES) % 3
DRAW = torch.Generator().manual_seed(2)
W, RELATIONS = torch.rand(EDGES, generator=DRAW), torch.arange(EDGES) % 3
ATTRIBUTES = torch.randn(EDGES, F, generator=DRAW)
POSITION = torch.randn(NODES, 3, generator=DRAW) * 2
ATOMS, LABELS = torch.arange(NODES) % 7, torch.arange(NODES) % OUT
BATCH = torch.arange(NODES) // 11
SOME = torch.arange(NODES) % 3 == 0
DEGREES = torch.ones(12, dtype=torch.long)
PNA = ["mean", "max", "min", "std"], ["identity", "amplification"], DEGREES
FEW = torch.stack([E[0], E[1] % 11])  # to nodes of another kind
NORMAL = torch.nn.functional.normalize(torch.randn(NODES, 3, generator=DRAW))
BY_TARGET = EdgeIndex(E[:, E[1].argsort()], sparse_size=(NODES, NODES), sort_order="col")
MESH = torch.stack([torch.arange(4 * NODES) // 4, torch.arange(4 * NODES) * 7 % NODES])
OF_TYPES = [("a", "to", "b"), ("b", "to", "a")]
MOLECULES = (BATCH[:, None] == BATCH) & (torch.cdist(POSITION, POSITION) < 5)
BONDS = MOLECULES.fill_diagonal_(False).nonzero().T.contiguous()  # sorted by targets


def bonds(*_, loop=False, **__):
    """A stand-in for pyg-lib's `radius_graph`."""
    if not loop:
        return BONDS
    return torch.cat([BONDS, torch.arange(NODES).expand(2, -1)], 1)


def triplets(edge_index, num_nodes):
    """Stand-ins for DimeNet's triplets, which need torch_sparse."""
    source, target = edge_index
    out, into = ((source[:, None] == target) & (target[:, None] != source)).nonzero().T
    return target, source, target[out], source[out], source[into], into, out


def mlp(inputs, outputs=OUT):
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, H), torch.nn.ReLU(), torch.nn.Linear(H, outputs)
    )


class Stack(torch.nn.Module):
    """Parts one after another, as a function of them says."""

    def __init__(self, call, *parts):
        super().__init__()
        self.call, self.parts = call, torch.nn.ModuleList(parts)

    def forward(self, x):
        return self.call(x, *self.parts)


def plain(x, net):
    return net(x, E)


def batched(x, net):
    return net(x, E, batch=BATCH)


def basic(net, **options):
    """A model that shares a class with others."""
    return lambda: Stack(plain, net(F, H, 2, OUT, **options))


def pooled(make, *args, **options):
    """A layer, a pool, a layer on what is left, and a mean of each graph."""

    def call(x, first, pool, second):
        x, pooled_edges, _, batch, *_ = pool(first(x, E).relu(), E, batch=BATCH)
        return pyg.global_mean_pool(second(x, pooled_edges), batch, 4)

    return lambda: Stack(
        call, pyg.GraphConv(F, H), make(H, *args, **options), pyg.GraphConv(H, OUT)
    )


def merged(make):
    """A pool that joins nodes."""

    def call(x, first, pool, second):
        x, pooled_edges, batch, _ = pool(first(x, E).relu(), E, BATCH)
        return pyg.global_add_pool(second(x, pooled_edges), batch, 4)

    return lambda: Stack(call, pyg.GCNConv(F, H), make(H), pyg.GCNConv(H, OUT))


def aggregated(make):
    return lambda: Stack(lambda x, aggr: aggr(x, BATCH, dim_size=4), make())


def deep(block):
    def call(x, *layers):
        for layer in layers:
            x = layer(x, E)
        return x

    def layer():
        norm, act = pyg.LayerNorm(F), torch.nn.ReLU()
        return pyg.DeepGCNLayer(pyg.GENConv(F, F), norm, act, block, dropout=0.1)

    return lambda: Stack(call, layer(), layer())


def molecule(make):
    """A model of atoms, whose positions follow from the features."""

    def call(x, net):
        return net(ATOMS, POSITION + 0.1 * x[:, :3], BATCH)

    return lambda: Stack(call, make())


def encoded(make):
    """An autoencoder: what it encodes, the loss of its edges, and others."""

    def call(x, net):
        z = net.encode(x, E)
        terms = [net.recon_loss(z, E[:, :90], E[:, 90:].flip(0))]
        terms += [net.kl_loss()] if hasattr(net, "kl_loss") else []
        if hasattr(net, "reg_loss"):
            terms += [net.reg_loss(z), net.discriminator_loss(z)]
        return z, sum(terms)

    return lambda: Stack(call, make())


class Ends(torch.nn.Module):
    """Two layers that give a mean and a deviation."""

    def __init__(self):
        super().__init__()
        self.first, self.second = pyg.GCNConv(F, OUT), pyg.GCNConv(F, OUT)

    def forward(self, x, edge_index):
        return self.first(x, edge_index), self.second(x, edge_index)


def infomax():
    encoder = pyg.DeepGraphInfomax(
        H,
        pyg.GCNConv(F, H),
        summary=lambda z, *_, **__: z.mean(0).sigmoid(),
        corruption=lambda x, e: (x.flip(0), e),
    )

    def call(x, net):
        positive, negative, summary = net(x, E)
        return positive, net.loss(positive, negative, summary)

    return Stack(call, encoder)


def meta():
    def edge_model(source, target, attributes, u, batch):
        return net.parts[1](torch.cat([source, target, attributes, u[batch]], 1))

    def node_model(x, edge_index, attributes, u, batch):
        source, target = edge_index
        means = pyg.aggr.MeanAggregation()(
            torch.cat([x[source], attributes], 1), target, dim_size=len(x)
        )
        return net.parts[2](torch.cat([x, means, u[batch]], 1))

    def global_model(x, edge_index, attributes, u, batch):
        return torch.cat([u, pyg.global_mean_pool(x, batch, 4)], 1)

    u = torch.ones(4, 3)
    layer = pyg.MetaLayer(edge_model, node_model, global_model)
    net = Stack(
        lambda x, meta, *_: meta(x, E, ATTRIBUTES, u, BATCH),
        layer, mlp(3 * F + 3), mlp(2 * F + OUT + 3),
    )  # fmt: skip
    return net


def memory():
    """A step of TGN's: what is kept of nodes, its messages, and attention along events."""
    size = 10
    net = pyg.TGNMemory(NODES, F, size, 5, tgn.IdentityMessage(F, size, 5), tgn.LastAggregator())
    time = torch.arange(EDGES)

    def call(x, net, attention):
        kept, last = net(torch.arange(NODES))
        away = (last[E[0]] - time).float()
        attributes = torch.cat([net.time_enc(away), ATTRIBUTES], -1)
        return attention(torch.cat([x, kept], 1), E, attributes)

    attention = pyg.TransformerConv(F + size, OUT, 2, edge_dim=F + 5, dropout=0.1)
    net.update_state(E[0], E[1], time, ATTRIBUTES)
    return Stack(call, net, attention)


def hetero(conv, jump=False):
    def call(x, first, second, *jumps):
        kinds = {"a": x, "b": x.sin()}
        edges_of = dict(zip(OF_TYPES, (E, E.flip(0)), strict=True))
        one = {k: v.relu() for k, v in first(kinds, edges_of).items()}
        two = second(one, edges_of)
        for jump in jumps:
            two = jump({k: [one[k], two[k]] for k in one})
        return list(two.values())

    def layer(inputs):
        return pyg.HeteroConv({k: conv((inputs, inputs), F) for k in OF_TYPES}, aggr="sum")

    jumps = [pyg.HeteroJumpingKnowledge(["a", "b"], "max")] if jump else []
    return lambda: Stack(call, layer(F), layer(F), *jumps)


def typed(make):
    """A layer of metadata, twice."""

    def call(x, *layers):
        kinds, edges_of = {"a": x, "b": x.cos()}, dict(zip(OF_TYPES, (E, E.flip(0)), strict=True))
        for layer in layers:
            kinds = layer(kinds, edges_of)
        return list(kinds.values())

    metadata = ["a", "b"], OF_TYPES
    return lambda: Stack(
        call, make({"a": F, "b": F}, H, metadata, 2), make({"a": H, "b": H}, OUT, metadata, 2)
    )


def converted():
    """A model of one kind of nodes, as `to_hetero` makes it one of several."""
    net = pyg.to_hetero(pyg.GraphSAGE((F, F), H, 2, OUT), (["a", "b"], OF_TYPES))
    edges_of = dict(zip(OF_TYPES, (E, E.flip(0)), strict=True))
    return Stack(lambda x, net: list(net({"a": x, "b": x.exp()}, edges_of).values()), net)


def propagated(net, soft=True):
    """The loss on labels, or on what a model says of them."""

    def call(x, lin, net):
        y = lin(x).softmax(-1)
        return net(y if soft else LABELS, E, SOME), y

    return Stack(call, torch.nn.Linear(F, OUT), net)


def smoothed():
    def call(x, lin, net):
        y = lin(x).softmax(-1)
        return net.smooth(net.correct(y, LABELS[SOME], SOME, E), LABELS[SOME], SOME, E), y

    net = pyg.CorrectAndSmooth(3, 0.8, 3, 0.8, autoscale=False, scale=1.2)
    return Stack(call, torch.nn.Linear(F, OUT), net)


def recurrent():
    net = pyg.RENet(NODES, 3, F, 3, dropout=0.1)
    n = 10
    h = torch.randint(0, NODES, (n, 3), generator=torch.Generator().manual_seed(3))
    data = {"sub": torch.arange(n), "rel": torch.arange(n) % 3, "obj": torch.arange(n) + 9}
    for of, index in (("h_sub", h), ("h_obj", h.flip(0))):
        data |= {of: index.flatten(), f"{of}_t": torch.arange(3).repeat(n)}
        data[f"{of}_batch"] = torch.arange(3 * n) // 3
    return Stack(lambda x, net, lin: (net(Data(**data)), lin(x)), net, torch.nn.Linear(F, 2))


def normed(make):
    def call(x, conv, norm):
        return norm(conv(x, E), BATCH)

    return lambda: Stack(call, pyg.GCNConv(F, F), make(F))


def after(make, call):
    """A layer, and what is called with it."""
    return lambda: Stack(lambda x, conv, part: call(part, conv(x, E)), pyg.GCNConv(F, F), make())


def clustered(pool):
    """A pool of given clusters."""
    cluster = torch.arange(NODES) % 13

    def call(x, conv):
        return pool(cluster, conv(x, E))

    return lambda: Stack(call, pyg.SAGEConv(F, H))


def neighbour_pool(pool):
    """A pool of each node's neighbours."""

    def call(x, conv):
        batch = torch.zeros(NODES, dtype=torch.long)
        return pool(Batch(x=conv(x, E), edge_index=E, batch=batch)).x

    return lambda: Stack(call, pyg.SAGEConv(F, H))


def reversible():
    net = pyg.GroupAddRev(pyg.SAGEConv(F // 2, F // 2), num_groups=2)
    return Stack(plain, net)


def lp():
    net = nets.LPFormer(F, H, num_transformer_layers=1, gnn_dropout=0.1)
    ppr = torch.rand(NODES, NODES).relu() * (torch.rand(NODES, NODES) > 0.6)
    ppr = ppr.to_sparse_coo().coalesce()
    return Stack(lambda x, net: net(E[:, :20], x, E, ppr), net)


def attracted():
    return Stack(plain, nets.ARLinkPredictor(F, H, OUT))


def gpse():
    net = nets.GPSE(dim_in=F, dim_inner=H, layers_mp=2, dim_out=5, num_node_targets=5,
                    num_graph_targets=3, multi_head_dim_inner=4, dropout=0.0)  # fmt: skip

    def call(x, net):
        data = Batch(
            x=x, edge_index=E, batch=BATCH, y=torch.ones(NODES, 5), y_graph=torch.ones(4, 3)
        )
        return net(data)

    return Stack(call, net)


GLOROT = {"output_initializer": "glorot_orthogonal"}
FORMS = {
    **{
        f"{net.__name__}{f', jk {jk}' if jk else ''}{f', {norm}' if norm else ''}": basic(
            net, jk=jk, norm=norm, dropout=0.1, **more
        )
        for net, more in [
            (pyg.GCN, {}), (pyg.GraphSAGE, {}), (pyg.GIN, {}), (pyg.GAT, {"heads": 2}),
            (pyg.PNA, {"aggregators": ["mean", "max", "std"], "scalers": ["identity"],
                       "deg": DEGREES}), (pyg.EdgeCNN, {}),
        ]
        for jk, norm in [(None, None), ("lstm", "BatchNorm"), ("max", "GraphNorm")]
    },
    "GCN, weights": lambda: Stack(lambda x, n: n(x, E, edge_weight=W), pyg.GCN(F, H, 2, OUT)),
    "GAT, v2, attributes": lambda: Stack(
        lambda x, n: n(x, E, edge_attr=ATTRIBUTES), pyg.GAT(F, H, 2, OUT, v2=True, edge_dim=F)
    ),
    "GraphSAGE, max, cat": basic(pyg.GraphSAGE, aggr="max", jk="cat", act="elu"),
    "GraphSAGE, trimmed": lambda: Stack(
        lambda x, n: n(x, E[:, (E < 30).all(0)],
                       num_sampled_nodes_per_hop=[10, 10, 10, 10],
                       num_sampled_edges_per_hop=[20, 20]), pyg.GraphSAGE(F, H, 2, OUT),
    ),
    "DeepGCN, res+": deep("res+"), "DeepGCN, res": deep("res"), "DeepGCN, dense": lambda: Stack(
        plain, pyg.DeepGCNLayer(pyg.GENConv(F, F), pyg.BatchNorm(F), torch.nn.ReLU(), "dense")
    ),
    "TopKPooling": pooled(pyg.TopKPooling), "TopKPooling, score": pooled(
        pyg.TopKPooling, min_score=0.2, nonlinearity="sigmoid"
    ),
    "SAGPooling": pooled(pyg.SAGPooling),
    "SAGPooling, GAT": pooled(pyg.SAGPooling, GNN=pyg.GATConv),
    "ASAPooling": pooled(pyg.ASAPooling, 0.7), "ASAPooling, GNN": pooled(
        pyg.ASAPooling, 0.5, GNN=pyg.GraphConv, add_self_loops=True, dropout=0.1
    ),
    "EdgePooling": merged(pyg.EdgePooling), "ClusterPooling": merged(pyg.ClusterPooling),
    "MemPooling": lambda: Stack(
        lambda x, conv, pool: pool(conv(x, E), BATCH), pyg.GCNConv(F, H),
        pyg.MemPooling(H, OUT, 2, 3),
    ),
    "max_pool_x": clustered(lambda c, x: pyg.max_pool_x(c, x, BATCH)),
    "avg_pool_x": clustered(lambda c, x: pyg.avg_pool_x(c, x, BATCH)),
    "max_pool_neighbor_x": neighbour_pool(pyg.max_pool_neighbor_x),
    "avg_pool_neighbor_x": neighbour_pool(pyg.avg_pool_neighbor_x),
    "GAE": encoded(lambda: pyg.GAE(pyg.GCN(F, H, 2, OUT))),
    "VGAE": encoded(lambda: pyg.VGAE(Ends())),
    "ARGA": encoded(lambda: pyg.ARGA(pyg.GCNConv(F, OUT), mlp(OUT, 1))),
    "ARGVA": encoded(lambda: pyg.ARGVA(Ends(), mlp(OUT, 1))),
    "DeepGraphInfomax": infomax, "MetaLayer": meta, "TGN": memory, "RENet": recurrent,
    "SignedGCN": lambda: Stack(lambda x, n: n(x, E[:, :90], E[:, 90:]), pyg.SignedGCN(F, OUT, 2)),
    "AttentiveFP": lambda: Stack(
        lambda x, n: n(x, E, ATTRIBUTES, BATCH), pyg.AttentiveFP(F, H, OUT, F, 2, 2, 0.1)
    ),
    "RECT_L": lambda: Stack(plain, pyg.RECT_L(F, H, dropout=0.1)),
    "LINKX": lambda: Stack(plain, pyg.LINKX(NODES, F, H, OUT, 2, dropout=0.1)),
    "LINKX, weights": lambda: Stack(
        lambda x, n: n(x, E, W), pyg.LINKX(NODES, F, H, OUT, 1, 2, 2)
    ),
    "LightGCN": lambda: Stack(
        lambda x, n, lin: (n.recommendation_loss(*n(E).split(100), E.unique()), lin(x)),
        pyg.LightGCN(NODES, F, 2), torch.nn.Linear(F, 2),
    ),
    "LightGCN, weights": lambda: Stack(
        lambda x, n: n(E, E.flip(0), x[E[0], 0].sigmoid()), pyg.LightGCN(NODES, F, 2)
    ),
    "MaskLabel": lambda: Stack(
        lambda x, mask, net: net(mask(x, LABELS, SOME), E), pyg.MaskLabel(OUT, F),
        pyg.GCNConv(F, OUT),
    ),
    "GroupAddRev": reversible, "PMLP": lambda: Stack(plain, pyg.PMLP(F, H, OUT, 3, 0.1)),
    "PMLP, no norm": lambda: Stack(plain, pyg.PMLP(F, H, OUT, 2, norm=False)),
    "NeuralFingerprint": lambda: Stack(batched, pyg.NeuralFingerprint(F, H, OUT, 2)),
    "LabelPropagation": lambda: propagated(pyg.LabelPropagation(3, 0.7)),
    "LabelPropagation, labels": lambda: propagated(pyg.LabelPropagation(3, 0.7), False),
    "CorrectAndSmooth": smoothed,
    "SchNet": molecule(lambda: pyg.SchNet(
        H, H, 2, 5, interaction_graph=lambda p, b: (BONDS, (p[BONDS[0]] - p[BONDS[1]]).norm(dim=-1))
    )),
    "DimeNet": molecule(lambda: pyg.DimeNet(H, OUT, 1, 2, 2, 2, **GLOROT)),
    "DimeNet++": molecule(lambda: pyg.DimeNetPlusPlus(
        H, OUT, 1, 4, 4, H, 2, 2, **GLOROT
    )),
    "GNNFF": molecule(lambda: pyg.GNNFF(H, H, 1)),
    "ViSNet": molecule(lambda: pyg.ViSNet(num_heads=2, num_layers=2, hidden_channels=H, num_rbf=4)),
    "ViSNet, vertices": molecule(lambda: pyg.ViSNet(
        lmax=2, vecnorm_type="max_min", num_heads=2, num_layers=2, hidden_channels=H, num_rbf=4,
        vertex=True,
    )),
    "SGFormer": lambda: Stack(batched, pyg.SGFormer(F, H, OUT, trans_dropout=0.1, gnn_dropout=0.1)),
    "Polynormer": lambda: Stack(
        batched, pyg.Polynormer(F, H, OUT, 2, 1, dropout=0.1, global_dropout=0.1)
    ),
    "Polynormer, attention": lambda: Stack(
        batched, pyg.Polynormer(F, H, OUT, 2, 1, heads=2, local_attn=True, pre_ln=True)
    ),
    "ARLinkPredictor": attracted, "LPFormer": lp, "GPSE": gpse,
    "HeteroConv, SAGE": hetero(pyg.SAGEConv), "HeteroConv, jumps": hetero(pyg.GraphConv, True),
    "HeteroConv, GATv2": hetero(lambda s, o: pyg.GATv2Conv(s, o, add_self_loops=False)),
    "to_hetero": converted, "HGT": typed(pyg.HGTConv), "HAN": typed(pyg.HANConv),
    "HEAT": lambda: Stack(
        lambda x, a, b: b(a(x, E, TYPES, RELATIONS, ATTRIBUTES), E, TYPES, RELATIONS, ATTRIBUTES),
        pyg.HEATConv(F, H, 3, 3, 5, F, 5, heads=2, dropout=0.1),
        pyg.HEATConv(2 * H, OUT, 3, 3, 5, F, 5),
    ),
    "MeshCNN": lambda: Stack(lambda x, n: n(x, MESH), pyg.MeshCNNConv(F, OUT)),
    "GMT": aggregated(lambda: pyg.aggr.GraphMultisetTransformer(F, 3, 1, 2)),
    "GRU": aggregated(lambda: pyg.aggr.GRUAggregation(F, OUT)),
    "aggregation by MLP": aggregated(lambda: pyg.aggr.MLPAggregation(F, OUT, 11, num_layers=1)),
    "LCM": aggregated(lambda: pyg.aggr.LCMAggregation(F, OUT)),
    "patches": aggregated(lambda: pyg.aggr.PatchTransformerAggregation(F, OUT, 3, H)),
    "quantiles, several": aggregated(
        lambda: pyg.aggr.QuantileAggregation([0.1, 0.5, 0.9], interpolation="midpoint")
    ),
    "set transformer, seeds": aggregated(
        lambda: pyg.aggr.SetTransformerAggregation(F, 2, 1, 1, 2, layer_norm=True, dropout=0.1)
    ),
    "softmax, learned": aggregated(
        lambda: pyg.aggr.SoftmaxAggregation(0.5, True, channels=F)
    ),
    "powermean, learned": lambda: Stack(
        lambda x, aggr: aggr(x.abs() + 0.1, BATCH, dim_size=4),
        pyg.aggr.PowerMeanAggregation(2.0, True),
    ),
    "SAGE, LSTM": lambda: Stack(
        lambda x, n: n(x, E[:, E[1].argsort()]), pyg.SAGEConv(F, OUT, aggr="lstm")
    ),
    "SAGE, several": lambda: Stack(
        plain, pyg.SAGEConv(F, OUT, aggr=["median", "powermean", "var"])
    ),
    "SAGE, attention": lambda: Stack(
        plain, pyg.SAGEConv(F, OUT, aggr=pyg.aggr.AttentionalAggregation(mlp(F, 1)))
    ),
    "BatchNorm": lambda: Stack(lambda x, c, n: n(c(x, E)), pyg.GCNConv(F, F), pyg.BatchNorm(F)),
    "InstanceNorm, kept": normed(
        lambda f: pyg.InstanceNorm(f, affine=True, track_running_stats=True)
    ),
    "LayerNorm, nodes": normed(lambda f: pyg.LayerNorm(f, mode="node")),
    "PairNorm, scaled": normed(lambda f: pyg.PairNorm(scale_individually=True)),
    "DiffGroupNorm": after(lambda: pyg.DiffGroupNorm(F, 3), lambda n, x: n(x)),
    "MessageNorm": after(lambda: pyg.MessageNorm(True), lambda n, x: n(x, x.sin())),
    "HeteroBatchNorm": after(lambda: pyg.HeteroBatchNorm(F, 3), lambda n, x: n(x, TYPES)),
    "HeteroLayerNorm": after(lambda: pyg.HeteroLayerNorm(F, 3), lambda n, x: n(x, TYPES)),
    "InnerProductDecoder": lambda: Stack(
        lambda x, c, d: (d(c(x, E), E), d.forward_all(c(x, E))), pyg.GCNConv(F, OUT),
        pyg.InnerProductDecoder(),
    ),
    "DropEdge": lambda: Stack(
        lambda x, c: c(x, dropout_edge(E, training=c.training)[0]),
        pyg.GCNConv(F, OUT),
    ),
}  # fmt: skip


# Arguments of layers by name, options, and what they take beside features and edges.
SIMPLE = [
    ("AGNNConv",), ("AntiSymmetricConv", (F,)), ("APPNP", (3, 0.1)), ("ARMAConv", (F, OUT)),
    ("CGConv", (F,)), ("CGConv", (F, F), {}, ATTRIBUTES), ("ChebConv", (F, OUT, 3)),
    ("ClusterGCNConv", (F, OUT)), ("DirGNNConv", (pyg.SAGEConv(F, OUT),)),
    ("EdgeConv", (mlp(2 * F),)), ("FastRGCNConv", (F, OUT, 3), {}, RELATIONS),
    ("FeaStConv", (F, OUT), {"heads": 3}), ("FiLMConv", (F, OUT)), ("GATConv", (F, OUT, 2)),
    ("GATConv", (F, OUT, 2), {"edge_dim": F}, ATTRIBUTES), ("GatedGraphConv", (F, 2)),
    ("GATv2Conv", (F, OUT, 2)), ("GCNConv", (F, OUT)), ("GENConv", (F, OUT)),
    ("GENConv", (F, OUT), {"aggr": "powermean"}), ("GeneralConv", (F, OUT)),
    ("GeneralConv", (F, OUT), {"attention": True, "heads": 2}), ("GINConv", (mlp(F),)),
    ("GINEConv", (mlp(F),), {}, ATTRIBUTES), ("GMMConv", (F, OUT, 3, 5), {}, ATTRIBUTES[:, :3]),
    ("GraphConv", (F, OUT)), ("HypergraphConv", (F, OUT)), ("LEConv", (F, OUT)), ("LGConv",),
    ("MFConv", (F, OUT)), ("MixHopConv", (F, OUT)),
    ("NNConv", (F, OUT, torch.nn.Linear(F, F * OUT)), {}, ATTRIBUTES),
    ("PDNConv", (F, OUT, F, OUT), {}, ATTRIBUTES), ("PNAConv", (F, OUT, *PNA)),
    ("ResGatedGraphConv", (F, OUT)), ("RGATConv", (F, OUT, 3), {}, RELATIONS),
    ("RGCNConv", (F, OUT, 3), {}, RELATIONS), *(("SAGEConv", (F, OUT), {"aggr": aggr}) for aggr in
    ("mean", "max", "median", "mul", "softmax", "std", ["mean", "max", "sum"])),
    ("SGConv", (F, OUT), {"K": 2}), ("SimpleConv",), ("SSGConv", (F, OUT, 0.1), {"K": 2}),
    ("TAGConv", (F, OUT)), ("TransformerConv", (F, OUT, 2)),
    ("TransformerConv", (F, OUT, 2), {"beta": True}), ("WLConvContinuous",),
]  # fmt: skip


def simple(name, args=(), options=None, *more):
    """A layer by its name, which takes features and edges first."""
    make = getattr(pyg, name)
    return lambda: Stack(lambda x, layer: layer(x, E, *more), make(*args, **(options or {})))


def called(make, call):
    """A layer, and how it is called."""
    return lambda: Stack(lambda x, layer: call(layer, x), make())


def pair(make):
    """A layer of nodes of two kinds."""
    return called(make, lambda layer, x: layer((x, x[:11].sin()), FEW))


def placed(make):
    """A layer of nodes that have places."""
    return called(make, lambda layer, x: layer(x, POSITION, E))


LAYERS = {
    **{" ".join([of[0], *map(str, of[2:3])]): simple(*of) for of in SIMPLE},
    "SignedConv": called(
        lambda: pyg.SignedConv(F, OUT, True), lambda m, x: m(x, E, E.flip(0))
    ),
    "DNAConv": called(
        lambda: pyg.DNAConv(F, 4), lambda m, x: m(x[:, None].expand(-1, 3, -1), E)
    ),
    "PointNetConv": placed(lambda: pyg.PointNetConv(mlp(F + 3), mlp(OUT))),
    "PPFConv": called(lambda: pyg.PPFConv(mlp(F + 4)), lambda m, x: m(x, POSITION, NORMAL, E)),
    "PointTransformerConv": placed(lambda: pyg.PointTransformerConv(F, OUT)),
    "PointGNNConv": placed(
        lambda: pyg.PointGNNConv(linear(F, 3), linear(F + 3, F), linear(F, F))
    ),
    "GCN2Conv": called(lambda: pyg.GCN2Conv(F, 0.1, 0.5, 1), lambda m, x: m(x, x.sin(), E)),
    "SuperGATConv": lambda: Stack(plain, pyg.SuperGATConv(F, OUT, 2, attention_type="SD").eval()),
    "FAConv": called(lambda: pyg.FAConv(F), lambda m, x: m(x, x.cos(), E)),
    "EGConv": lambda: Stack(plain, pyg.EGConv(F, OUT, ["sum", "mean", "max"])),
    "GPSConv": lambda: Stack(batched, pyg.GPSConv(F, pyg.GINConv(linear(F, F)), heads=2).eval()),
    "GAT, pair": pair(lambda: pyg.GATConv((F, F), OUT, 2, add_self_loops=False)),
    "GATv2, pair": pair(lambda: pyg.GATv2Conv((F, F), OUT, 2, add_self_loops=False)),
    "Transformer, pair": pair(lambda: pyg.TransformerConv((F, F), OUT, 2)),
    "GraphConv, pair": pair(lambda: pyg.GraphConv((F, F), OUT)),
    "SAGE, no targets": called(
        lambda: pyg.SAGEConv(F, OUT), lambda m, x: m((x, None), FEW, (NODES, 11))
    ),
    **{
        f"{name}, EdgeIndex": called(
            lambda n=name: getattr(pyg, n)(F, OUT), lambda m, x: m(x, BY_TARGET)
        )
        for name in ["GCNConv", "SAGEConv", "GATConv", "GraphConv", "TransformerConv"]
    },
    "GAT, other flow": lambda: Stack(plain, pyg.GATConv(F, OUT, 2, flow="target_to_source")),
    "product": aggregated(lambda: pyg.aggr.MultiAggregation(["mul"])),
    "Set2Set": aggregated(lambda: pyg.aggr.Set2Set(F, 2)),
    "degree scaler": aggregated(
        lambda: pyg.aggr.DegreeScalerAggregation(["mean", "max"], ["amplification"], DEGREES)
    ),
    "sort": aggregated(lambda: pyg.aggr.SortAggregation(3)),
    "deep sets": aggregated(lambda: pyg.aggr.DeepSetsAggregation(mlp(F), mlp(OUT))),
    "variance": aggregated(pyg.aggr.VariancePreservingAggregation),
    "global_max_pool": called(
        lambda: linear(F, F), lambda m, x: pyg.global_max_pool(m(x), BATCH)
    ),
    "LayerNorm": normed(pyg.LayerNorm),
    "GraphSizeNorm": normed(lambda f: pyg.GraphSizeNorm()),
    "MeanSubtractionNorm": normed(lambda f: pyg.MeanSubtractionNorm()),
}  # fmt: skip


def run(call, net, x):
    """The results of a call, and gradients of the features, then of parameters."""
    x = x.clone().requires_grad_()
    torch.manual_seed(7)
    out = call(x)
    tensors = [o for o in tree_leaves(out) if isinstance(o, torch.Tensor)]
    floats = [o for o in tensors if o.is_floating_point() and o.requires_grad]
    values = [o.detach().clone() for o in tensors]  # a reversible layer drops its own
    net.zero_grad()
    sum((o * torch.linspace(0.2, 1, o.numel()).view_as(o)).sum() for o in floats).backward()
    return [*values, x.grad, *(p.grad for p in net.parameters())]


@pytest.fixture(autouse=True)
def plain_kernels(plain):
    """Schedules do not matter here."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "training"), [*itertools.product(FORMS, (True, False)), *((n, True) for n in LAYERS)]
)
def test_a_model(name, training, monkeypatch):
    for module in (schnet, dimenet, visnet, gnnff):
        monkeypatch.setattr(module, "radius_graph", bonds, raising=False)
        monkeypatch.setattr(module, "triplets", triplets, raising=False)
    both = []
    for _ in range(2):
        torch.manual_seed(0)
        both.append((FORMS | LAYERS)[name]())
        if not training:
            both[-1].eval()
    net, ours = both
    x = torch.randn(NODES, F)
    expected = run(net, net, x)
    result = run(torch.compile(ours, backend="sparsetir"), ours, x)
    for a, b in zip(result, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
            torch.testing.assert_close(a, b, rtol=1e-4, atol=5e-5 * scale, equal_nan=True)
