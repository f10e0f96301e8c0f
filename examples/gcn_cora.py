"""A graph convolutional network on Cora: about 81 % of the test nodes right.

Kipf and Welling, "Semi-supervised classification with graph convolutional networks", 2017.
"""

import cora
import torch
from torch import Tensor

from sparsetir.nn import GCNConv


class GCN(torch.nn.Module):
    """Two layers, 16 hidden features."""

    def __init__(self, features: int, classes: int, hidden: int = 16) -> None:
        super().__init__()
        self.first = GCNConv(features, hidden, cached=True)
        self.second = GCNConv(hidden, classes, cached=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Scores (n, classes)."""
        x = cora.dropout(x, 0.5, self.training)
        x = self.first(x, edge_index).relu()
        x = cora.dropout(x, 0.5, self.training)
        return self.second(x, edge_index)


if __name__ == "__main__":
    cora.main(GCN, __doc__, lr=0.01)
