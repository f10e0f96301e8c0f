"""GraphSAGE with means on Cora, over whole neighbourhoods: about 80 % of the test nodes right.

Hamilton, Ying, Leskovec, "Inductive representation learning on large graphs", 2017.
"""

import cora
import torch
from torch import Tensor

from sparsetir.nn import SAGEConv


class SAGE(torch.nn.Module):
    """Two layers, 16 hidden features."""

    def __init__(self, features: int, classes: int, hidden: int = 16) -> None:
        super().__init__()
        self.first = SAGEConv(features, hidden)
        self.second = SAGEConv(hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Scores (n, classes)."""
        x = cora.dropout(x, 0.5, self.training)
        x = self.first(x, edge_index).relu()
        x = cora.dropout(x, 0.5, self.training)
        return self.second(x, edge_index)


if __name__ == "__main__":
    cora.main(SAGE, __doc__, lr=0.01)
