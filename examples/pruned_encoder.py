"""A BERT-sized encoder with pruned weights, end to end on a CPU, beside the dense one.

    python examples/pruned_encoder.py --threads 1

Weights are pruned by magnitude, without training: in blocks of 32 x 32 of which 90 % go, and one by
one at 95 %. They are random, or those of `--state FILE`, a state dictionary of a BERT as Hugging
Face names its parameters. What is printed for each dtype: the least time of a forward pass, models
taking turns; bytes of the weights; and the largest difference from the dense model in float32 that
has the same pruned weights, so that it shows rounding alone. The accuracy of a pruned model needs
training, which is not shown here.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, scaled_dot_product_attention

from sparsetir.nn import SparseLinear, sparse_linears

BERT = {"layers": 12, "hidden": 768, "intermediate": 3072, "heads": 12}


class SelfAttention(torch.nn.Module):
    """Queries, keys and values of all heads."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (torch.nn.Linear(hidden, hidden) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, hidden), of x of that shape."""
        batch, length, hidden = x.shape
        split = (batch, length, self.heads, hidden // self.heads)
        q, k, v = (f(x).view(split).transpose(1, 2) for f in (self.query, self.key, self.value))
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


class Output(torch.nn.Module):
    """A linear layer back to the hidden features, added to what went in, normalised."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(features, hidden)
        self.LayerNorm = torch.nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        """(batch, length, hidden)."""
        return self.LayerNorm(self.dense(x) + before)


class Layer(torch.nn.Module):
    """One layer, whose parts have the names that BERT's have."""

    def __init__(self, hidden: int, intermediate: int, heads: int) -> None:
        super().__init__()
        attention = {"self": SelfAttention(hidden, heads), "output": Output(hidden, hidden)}
        self.attention = torch.nn.ModuleDict(attention)
        self.intermediate = torch.nn.ModuleDict({"dense": torch.nn.Linear(hidden, intermediate)})
        self.output = Output(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, hidden), of x of that shape."""
        x = self.attention["output"](self.attention["self"](x), x)
        return self.output(gelu(self.intermediate["dense"](x)), x)


class Encoder(torch.nn.Module):
    """BERT without its embeddings and its pooler."""

    def __init__(self, layers: int, hidden: int, intermediate: int, heads: int) -> None:
        super().__init__()
        self.layer = torch.nn.ModuleList(Layer(hidden, intermediate, heads) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, hidden), of x of that shape."""
        for layer in self.layer:
            x = layer(x)
        return x


def load(encoder: Encoder, path: str) -> None:
    """Take the weights of a BERT; its file holds a state dictionary."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    own = {name.partition("encoder.")[2]: x for name, x in state.items() if "encoder." in name}
    encoder.load_state_dict(own)


def densified(sparse: Encoder, dense: Encoder) -> Encoder:
    """A dense encoder with the weights that a pruned one has kept."""
    out = copy.deepcopy(dense)
    for name, module in sparse.named_modules():
        if isinstance(module, SparseLinear):
            out.get_submodule(name).weight.data.copy_(module.dense_weight())
    return out


def bytes_of(model: torch.nn.Module) -> int:
    """Bytes of parameters and of their positions."""
    return sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))


def least_times(models: dict[str, torch.nn.Module], x: Tensor, rounds: int) -> dict[str, float]:
    """Seconds of a forward pass, models taking turns."""
    best = dict.fromkeys(models, math.inf)
    for turn in range(rounds + 1):  # the first compiles
        for name, model in models.items():
            start = time.perf_counter()
            model(x)
            seconds = time.perf_counter() - start
            best[name] = min(best[name], seconds) if turn else math.inf
    return best


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each dtype and model."""
    torch.manual_seed(0)
    sizes = {name: getattr(arguments, name) for name in BERT}
    dense = Encoder(**sizes).eval()
    if arguments.state:
        load(dense, arguments.state)
    block = (arguments.block, arguments.block)
    pruned = {
        f"blocks of {block[0]}, {arguments.block_sparsity:.0%}": {
            "sparsity": arguments.block_sparsity, "block": block,
        },
        f"one by one, {arguments.sparsity:.0%}": {"sparsity": arguments.sparsity},
    }  # fmt: skip
    models: dict[str, Encoder] = {}
    for name, how in pruned.items():
        models[name] = copy.deepcopy(dense)
        count = len(sparse_linears(models[name], **how))
        print(f"{name}: {count} linear layers")
    same = {name: densified(model, dense) for name, model in models.items()}
    x = torch.randn(arguments.batch, arguments.length, arguments.hidden)
    records = []
    for dtype in arguments.dtypes:
        kind = getattr(torch, dtype)
        given = {"dense": dense, **models}
        these = {name: copy.deepcopy(model).to(kind) for name, model in given.items()}
        times = least_times(these, x.to(kind), arguments.rounds)
        for name, model in these.items():
            wanted = same.get(name, dense)(x)
            difference = (model(x.to(kind)).float() - wanted).abs().max().item()
            records.append({
                "model": name, "dtype": dtype, "seconds": times[name], "bytes": bytes_of(model),
                "times faster": times["dense"] / times[name], "difference": difference,
            })  # fmt: skip
            print(
                f"  {name:22} {dtype:10} {1e3 * times[name]:9.1f} ms  "
                f"{times['dense'] / times[name]:5.2f} times as fast as dense  "
                f"{bytes_of(model) / 1e6:7.1f} MB  difference {difference:.1e}",
                flush=True,
            )
    return records


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Compare models of the size that the arguments say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in BERT.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--block", type=int, default=32, help="rows and columns of a block")
    parser.add_argument("--block-sparsity", type=float, default=0.9)
    parser.add_argument("--sparsity", type=float, default=0.95, help="of weights one by one")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each model")
    parser.add_argument("--threads", type=int, help="of torch and of ours; by default all")
    parser.add_argument("--state", metavar="FILE", help="a BERT's state dictionary")
    parser.add_argument("--json", metavar="FOLDER", help="where to write the results")
    arguments = parser.parse_args(argv)
    if arguments.threads:
        os.environ["TVM_NUM_THREADS"] = str(arguments.threads)
        torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        records = compare(arguments)
    if arguments.json:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from bench.report import circumstances, write

        sizes = {name: getattr(arguments, name) for name in (*BERT, "batch", "length")}
        where = {**circumstances(arguments.threads or torch.get_num_threads()), "sizes": sizes}
        write(Path(arguments.json), "encoder", where, records)
    return records


if __name__ == "__main__":
    main()
