"""Models as libraries that TVM's runtime runs alone."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

pytest.importorskip("torch_geometric")

import torch_geometric.nn as pyg

import sparsetir
from graph_models import FEATURES, MODELS, Wrapped, edges, made
from refusals import refuse
from sparsetir.graph.expressions import FORMULAS, aten
from sparsetir.graph.programs import filled, layout
from sparsetir.graph.rest import has_compiler
from sparsetir.sparse_ir.script.parser import from_source

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
SIZES = (30, 150), (57, 333), (9, 1), (6, 0)
ROWS = [("I", "i")]
DEFAULT = ["GAT"]
ALONE = """
import sys
sys.modules["torch"] = sys.modules["sparsetir"] = None
import numpy, tvm
from tvm import relax
library, given, out = sys.argv[1:]
given = numpy.load(given)
vm = relax.VirtualMachine(tvm.runtime.load_module(library), tvm.cpu())
found = vm["main"](*(tvm.runtime.tensor(given[n]) for n in given.files))
numpy.save(out, found.numpy())
"""


class Block(torch.nn.Module):
    """Norms, activations, a softmax and two results."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = pyg.SAGEConv(FEATURES, 8), torch.nn.BatchNorm1d(8)
        self.layer, self.out = torch.nn.LayerNorm(8), torch.nn.Linear(8, 5)

    def forward(self, x, edge_index):
        h = torch.nn.functional.elu(self.norm(self.conv(x, edge_index)))
        h = self.layer(torch.nn.functional.dropout(h, 0.5, self.training))
        return torch.softmax(self.out(h), -1), h.mean(-1)


def loaded(path):
    vm = relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())
    return lambda *args: vm["main"](*(tvm.runtime.tensor(x.numpy()) for x in args))


def check(model, run, weighted=False, width=None):
    """width : features of edges beside the numbers of nodes"""
    model.eval()
    of_edges = [()] if weighted else [(width,)] if width else []
    for nodes, count in SIZES:
        x = torch.randn(nodes, FEATURES)
        args = [x, edges(nodes, nodes, count), *(torch.rand(count, *w) for w in of_edges)]
        with torch.no_grad():
            expected = model(*args)
        outs = run(*args)
        pairs = (
            [(outs, expected)] if torch.is_tensor(expected) else zip(outs, expected, strict=True)
        )
        for a, b in pairs:
            torch.testing.assert_close(torch.from_numpy(a.numpy()), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_models(name, tmp_path):
    model, args = made(name)
    path = tmp_path / "model.so"
    sparsetir.export(model, args, path)
    assert model.training and [p.name for p in tmp_path.iterdir()] == ["model.so"]
    check(model, loaded(path), len(args) > 2)


@pytest.mark.slow
def test_self_loops_of_edges_with_features(tmp_path):
    torch.manual_seed(0)
    model = Wrapped(pyg.GATv2Conv(FEATURES, 4, heads=2, edge_dim=3))
    path = tmp_path / "model.so"
    sparsetir.export(model, (torch.randn(30, FEATURES), edges(), torch.rand(150, 3)), path)
    check(model, loaded(path), width=3)


@pytest.mark.slow
def test_what_is_no_message(tmp_path):
    torch.manual_seed(0)
    model = Block()
    model(torch.randn(30, FEATURES), edges())  # statistics
    path = tmp_path / "block.so"
    sparsetir.export(model, (torch.randn(30, FEATURES), edges()), path)
    check(model, loaded(path))


class TwoSizes(torch.nn.Module):
    """One index names nodes of two kinds, whose numbers differ."""

    def forward(self, x, y, edge_index):
        source, target = edge_index
        few = x.new_zeros(len(x), x.shape[1]).index_add(0, target, y[source] * y[target])
        return few, y.new_zeros(len(y), y.shape[1]).index_add(0, target, y[source])


@pytest.mark.slow
def test_an_index_of_nodes_of_two_kinds(tmp_path):
    model, path = TwoSizes(), tmp_path / "model.so"
    args = torch.randn(30, 8), torch.randn(40, 8), edges(1, 30, 150)
    sparsetir.export(model, args, path)
    for a, b in zip(loaded(path)(*args), model(*args), strict=True):
        torch.testing.assert_close(torch.from_numpy(a.numpy()), b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_without_torch_and_this_package(tmp_path):
    model, args = made("SAGE")
    path, given, out = (tmp_path / name for name in ("model.so", "given.npz", "out.npy"))
    sparsetir.export(model, args, path)
    np.savez(given, *(x.numpy() for x in args))
    done = subprocess.run(
        [sys.executable, "-c", ALONE, path, given, out], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = model.eval()(*args)
    torch.testing.assert_close(torch.from_numpy(np.load(out)), expected, rtol=1e-4, atol=1e-5)
    wrong = args[1].clone()
    wrong[1, 7] = 30
    with pytest.raises(Exception, match="a node of edges is out of range"):
        loaded(path)(args[0], wrong)


def test_refusals(tmp_path):
    model, args = made("SAGE")
    taken, to = tmp_path / "there.so", tmp_path / "m.so"
    taken.write_bytes(b"mine")
    linear = torch.nn.Linear(FEATURES, 8)
    sums, noise, pool = torch.nn.Sequential(linear, Sums()), Noise(), Pooled()
    refuse(
        """
        sparsetir.export(model, args, tmp_path / "m.tar")  # ValueError: 'path': expected a name tha
        sparsetir.export(model, args, taken)  # FileExistsError: 'path': .. overwrite=True
        sparsetir.export(len, args, taken)  # TypeError: 'model': expected a torch.nn.Module
        sparsetir.export(model, [1], taken)  # TypeError: 'inputs': expected tensors, got int at 0
        sparsetir.export(model, args, to, target="cuda")  # ValueError: 'target': expected a CPU
        sparsetir.export(sums, args[:1], to)
            # LoweringError: aten.cumsum.default that gives (s .. 8) .. in layer '1' (Sums)
        sparsetir.export(linear.double(), (args[0].double(),), to)
            # LoweringError: of torch.float64 is not supported
        sparsetir.export(pool, (*args, torch.arange(30) // 10), to)
            # LoweringError: 'model': 'dim_size = int(index.max()) .. pools of graphs need
        sparsetir.export(noise, args[:1], to)  # LoweringError: operator aten.rand.default
        """,
        locals(),
    )
    assert taken.read_bytes() == b"mine"
    assert [p.name for p in tmp_path.iterdir()] == ["there.so"]


class Noise(torch.nn.Module):
    def forward(self, x):
        return x * torch.rand(FEATURES)


class Pooled(torch.nn.Module):
    def forward(self, x, edge_index, graph):
        return pyg.global_add_pool(x, graph)


class Sums(torch.nn.Module):
    def forward(self, x):
        return x.cumsum(0)


@pytest.mark.parametrize(
    ("operator", "exact", "ulp"),
    [(aten.expm1.default, np.expm1, 2.2), (aten.log1p.default, np.log1p, 1)],
)
def test_digits(operator, exact, ulp):
    around = np.logspace(-30, 1.2, 5000)
    x = np.concatenate([around, -around * (exact is np.expm1)]).astype("f4")
    lines = ["OUT[i] = " + filled(FORMULAS[operator], "X0[i]", dtype="float32")]
    text = layout("digits", [ROWS], ROWS, ROWS, "S", [], lines)
    out = np.empty_like(x)
    sparsetir.build(from_source(text))(out=out, x0=x, m=len(x))
    wanted = exact(x.astype("f8"))
    assert (np.abs(out - wanted) <= ulp * np.spacing(np.abs(wanted).astype("f4"))).all()
