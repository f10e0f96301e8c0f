"""A graph attention network on Cora: about 82 % of the test nodes right.

Veličković et al., "Graph attention networks", 2018.
"""

import cora
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsetir.nn import GATConv


class GAT(torch.nn.Module):
    """Two layers; the first has 8 heads of 8 features."""

    def __init__(self, features: int, classes: int, hidden: int = 8, heads: int = 8) -> None:
        super().__init__()
        self.first = GATConv(features, hidden, heads, dropout=0.6)
        self.second = GATConv(hidden * heads, classes, dropout=0.6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Scores (n, classes)."""
        x = cora.dropout(x, 0.6, self.training)
        x = F.elu(self.first(x, edge_index))
        x = cora.dropout(x, 0.6, self.training)
        return self.second(x, edge_index)


if __name__ == "__main__":
    cora.main(GAT, __doc__, lr=0.005)
