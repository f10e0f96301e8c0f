"""A relational graph convolutional network that classifies entities of a knowledge graph.

Without features: the first layer has a row of weights for each entity and relation. The graph is
generated in the manner of AIFB (8285 entities, 45 relations in both directions, 4 classes), unless
one is given in an .npz file with `num_nodes`, `src`, `dst`, `etype`, and maybe `labels` (n,) with
-1 for unknown ones, and `train` and `test`, which entities are for what. Of AIFB without labels
(`etype_names`, `node_type`, `ntype_names`), persons get the research group that published most of
what they wrote: not the published labels, but a target that the graph tells, too.

Schlichtkrull et al., "Modeling relational data with graph convolutional networks", 2018.
"""

import argparse
import statistics
from typing import NamedTuple

import numpy as np
import scipy.sparse
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import trange

from sparsetir.nn import RGCNConv

WEIGHT_DECAY = 5e-4
GROUPS = 10  # of each class
TRAINED = 0.8  # of the entities with labels, as of AIFB's 176


class Data(NamedTuple):
    """A graph of n entities.

    edge_index, edge_type : (2, E) and (E,)
    labels : (n,), -1 if unknown
    split : entities to train on and to test; None for random ones
    """

    nodes: int
    edge_index: Tensor
    edge_type: Tensor
    labels: Tensor
    split: tuple[Tensor, Tensor] | None = None

    @property
    def relations(self) -> int:
        """The number of relations."""
        return int(self.edge_type.max()) + 1


class RGCN(torch.nn.Module):
    """Two layers; relations share bases."""

    def __init__(self, data: Data, classes: int, hidden: int = 16, bases: int = 30) -> None:
        super().__init__()
        self.first = RGCNConv(data.nodes, hidden, data.relations, num_bases=bases)
        self.second = RGCNConv(hidden, classes, data.relations, num_bases=bases)

    def forward(self, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        """Scores (n, classes)."""
        x = self.first(None, edge_index, edge_type).relu()
        return self.second(x, edge_index, edge_type)


def generate(
    nodes: int = 8285, edges: int = 29043, relations: int = 45, classes: int = 4, labels: int = 176
) -> Data:
    """A graph in which a fifth of the relations lead to groups of one class, and others anywhere.

    edges : each is there in both directions, with a relation of its own for the other direction
    """
    random = np.random.default_rng(0)
    kind = random.integers(classes, size=nodes)
    relation = np.minimum(random.geometric(0.08, edges) - 1, relations - 1)
    source, target = random.integers(nodes, size=(2, edges))
    groups = [np.flatnonzero(kind == k)[:GROUPS] for k in range(classes)]
    telling = relation % 5 == 0
    target[telling] = [random.choice(groups[kind[s]]) for s in source[telling]]
    known = np.full(nodes, -1)
    # Entities of which something is known, as those with labels in AIFB are.
    chosen = random.choice(np.unique(source[telling]), labels, replace=False)
    known[chosen] = kind[chosen]
    edge_index = np.stack([np.append(source, target), np.append(target, source)])
    edge_type = np.append(relation, relation + relations)
    return Data(nodes, *map(torch.from_numpy, (edge_index, edge_type, known)))


def load(path: str) -> Data:
    """A graph from an .npz file; with random labels where nothing tells them."""
    with np.load(path) as arrays:
        nodes = int(arrays["num_nodes"])
        edge_index = np.stack([arrays["src"], arrays["dst"]]).astype(np.int64)
        edge_type = arrays["etype"].astype(np.int64)
        random = np.random.default_rng(0)
        if "labels" in arrays:
            labels = arrays["labels"].astype(np.int64)
        elif "ntype_names" in arrays and "Forschungsgruppen" in arrays["ntype_names"]:
            labels = groups_of_persons(dict(arrays))
        else:
            labels = random.integers(4, size=nodes)
        split = None
        if "train" in arrays and "test" in arrays:
            split = tuple(torch.from_numpy(arrays[k].astype(np.int64)) for k in ("train", "test"))
    return Data(nodes, *map(torch.from_numpy, (edge_index, edge_type, labels)), split)


def groups_of_persons(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """(n,) which of the four largest research groups published most of what a person wrote."""
    kind = arrays["ntype_names"][arrays["node_type"]]
    nodes = len(kind)

    def edges(name: str, sources: str, targets: str) -> scipy.sparse.csr_array:
        relation = arrays["etype_names"][arrays["etype"]] == name
        source, target = arrays["src"][relation], arrays["dst"][relation]
        right = (kind[source] == sources) & (kind[target] == targets)
        ends = source[right], target[right]
        return scipy.sparse.csr_array((np.ones(right.sum()), ends), shape=(nodes, nodes))

    wrote = edges("author", "Publikationen", "Personen")
    published = edges("publishes", "Forschungsgruppen", "Publikationen")
    papers = (published @ wrote).toarray()
    largest = np.argsort(-papers.sum(1), kind="stable")[:4]
    counts = papers[largest]
    return np.where(counts.max(0) > 0, counts.argmax(0), -1)


def randomly(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Entities with labels to train on and to test."""
    known = (labels >= 0).nonzero()[:, 0]
    known = known[torch.randperm(len(known))]
    cut = int(TRAINED * len(known))
    return known[:cut], known[cut:]


def train(data: Data, epochs: int, seed: int) -> float:
    """Accuracy on the entities with labels that were not trained on."""
    torch.manual_seed(seed)
    trained, tested = data.split or randomly(data.labels)
    model = RGCN(data, int(data.labels.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=WEIGHT_DECAY)
    bar = trange(epochs, desc=f"seed {seed}", leave=False, disable=None)
    for _ in bar:
        optimizer.zero_grad()
        out = model(data.edge_index, data.edge_type)
        loss = F.cross_entropy(out[trained], data.labels[trained])
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    with torch.no_grad():
        right = model(data.edge_index, data.edge_type).argmax(1) == data.labels
    return right[tested].float().mean().item()


def main(argv: list[str] | None = None) -> list[float]:
    """Train with several seeds, and print the mean and the deviation of the accuracies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", metavar="FILE", help="an .npz file; by default a generated graph")
    parser.add_argument("--seeds", type=int, default=10, help="runs, with seeds from 0")
    parser.add_argument("--epochs", type=int, default=50, help="epochs of each run")
    arguments = parser.parse_args(argv)
    if min(arguments.seeds, arguments.epochs) < 1:
        parser.error("--seeds and --epochs must be 1 or more")
    data = load(arguments.data) if arguments.data else generate()
    found = []
    for seed in range(arguments.seeds):
        found.append(100 * train(data, arguments.epochs, seed))
        print(f"seed {seed}: test accuracy {found[-1]:.1f} %", flush=True)
    deviation = statistics.stdev(found) if len(found) > 1 else 0.0
    print(f"test accuracy of {len(found)} runs: {statistics.mean(found):.1f} ± {deviation:.1f} %")
    return found


if __name__ == "__main__":
    main()
