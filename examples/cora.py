"""Data, training and arguments of the examples on Cora."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import trange

from sparsetir.datasets import load_cora_dataset

WEIGHT_DECAY = 5e-4


class Data(NamedTuple):
    """A graph for node classification: x (n, d), edge_index (2, E), y (n,) and masks (n,).

    x is a sparse matrix, of which 1.3 % are words that papers have; layers multiply it as such.
    """

    x: Tensor
    edge_index: Tensor
    y: Tensor
    train: Tensor
    val: Tensor
    test: Tensor


def load() -> Data:
    """Cora with the Planetoid split, and features that add up to one in each row."""
    cora = load_cora_dataset()
    words = cora.features
    counts = np.diff(words.indptr)
    values = words.data / np.repeat(counts, counts)
    arrays = map(torch.from_numpy, (words.indptr, words.indices, values.astype(np.float32)))
    x = torch.sparse_csr_tensor(*arrays, size=words.shape)
    # Of a matrix of targets x sources; sources come first in an edge_index.
    target, source = cora.graph.nonzero()
    edge_index = torch.from_numpy(np.stack([source, target]).astype(np.int64))
    masks = map(torch.from_numpy, (cora.train, cora.val, cora.test))
    return Data(x, edge_index, torch.from_numpy(cora.labels), *masks)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """`torch.nn.functional.dropout`, also of a sparse matrix, whose zeros stay zeros."""
    if x.layout is torch.strided:
        return F.dropout(x, p, training)
    values = F.dropout(x.values(), p, training)
    return torch.sparse_csr_tensor(x.crow_indices(), x.col_indices(), values, x.shape)


def train(model: torch.nn.Module, data: Data, epochs: int, lr: float, name: str) -> float:
    """Test accuracy after the epoch of the best validation accuracy, the first of equal ones."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=WEIGHT_DECAY)
    best_val = best_test = -1.0
    bar = trange(epochs, desc=name, leave=False, disable=None)
    for _ in bar:
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train], data.y[data.train])
        loss.backward()
        optimizer.step()
        val, test = evaluate(model, data)
        if val > best_val:
            best_val, best_test = val, test
        bar.set_postfix(loss=f"{loss.item():.3f}", val=f"{val:.3f}", test=f"{best_test:.3f}")
    return best_test


@torch.no_grad()
def evaluate(model: torch.nn.Module, data: Data) -> tuple[float, float]:
    """Accuracy on the validation and test nodes."""
    model.eval()
    right = (model(data.x, data.edge_index).argmax(1) == data.y).float()
    return right[data.val].mean().item(), right[data.test].mean().item()


def main(
    make_model: Callable[[int, int], torch.nn.Module],
    description: str,
    lr: float,
    argv: list[str] | None = None,
) -> list[float]:
    """Train with several seeds, and print the mean and the deviation of the accuracies.

    make_model : (features, classes) -> model of (x, edge_index)
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", type=int, default=10, help="runs, with seeds from 0")
    parser.add_argument("--epochs", type=int, default=200, help="epochs of each run")
    arguments = parser.parse_args(argv)
    if min(arguments.seeds, arguments.epochs) < 1:
        parser.error("--seeds and --epochs must be 1 or more")
    data = load()
    found = []
    for seed in range(arguments.seeds):
        torch.manual_seed(seed)
        model = make_model(data.x.shape[1], int(data.y.max()) + 1)
        accuracy = train(model, data, arguments.epochs, lr, f"seed {seed}")
        print(f"seed {seed}: test accuracy {accuracy:.1%}", flush=True)
        found.append(100 * accuracy)
    deviation = statistics.stdev(found) if len(found) > 1 else 0.0
    print(f"test accuracy of {len(found)} runs: {statistics.mean(found):.1f} ± {deviation:.1f} %")
    return found
