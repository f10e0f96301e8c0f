"""Regions are tuned as programs, and models use what was recorded for them."""

import pytest
import torch

pytest.importorskip("torch_geometric")
pytest.importorskip("optuna")

import sparsetir
from fake_measurer import install
from graph_models import FEATURES, NODES, Own, edges, gradients
from sparsetir.graph.programs import Program
from sparsetir.records import records as module
from sparsetir.records.records import Records
from sparsetir.records.task import Outcome

W = torch.rand(150)


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """Configs of the kernels of regions; records are in a separate file."""
    monkeypatch.setenv("SPARSETIR_RECORDS", str(tmp_path / "records.sqlite"))
    monkeypatch.setattr(module, "_seen", (None, {}))
    monkeypatch.setattr(module, "_warned", set())
    taken, kernel = [], Program.kernel

    def noted(self, aligned, config=None):
        taken.append(config)
        return kernel(self, aligned, config)

    monkeypatch.setattr(Program, "kernel", noted)
    return taken


def tuned(monkeypatch, report):
    """A search of a sum at nodes, in which the default is the slowest; what it finds is right."""
    (graph,) = report.graphs
    call = graph.call([region.node for region in graph.found].index("index_add"))
    install(monkeypatch, lambda config: Outcome("ok", seconds=0.5 if config else 1.0))
    result = sparsetir.tune(call.function, call.arguments, trials=3, sampler="random")
    prepared = result.task.prepared(result.best.config)
    prepared.call()
    assert result.config and prepared.wrong() is None
    return result


def test_a_record_is_used(configs, monkeypatch, tmp_path):
    model, args = Own(FEATURES, 32), (torch.randn(NODES, FEATURES), edges(), W)
    expected = gradients(model, model, *args)
    report = sparsetir.explain(model, *args)
    result = tuned(monkeypatch, report)
    assert [r.key for r in Records().all()] == [result.key] and not any(configs)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="sparsetir")
    torch.testing.assert_close(gradients(compiled, model, *args), expected, rtol=1e-4, atol=1e-5)
    assert [dict(c) for c in configs if c] == [result.config]

    configs.clear()
    other = edges(seed=2)  # of the same sizes, for which there is no record
    expected = gradients(model, model, args[0], other, W)
    result = gradients(compiled, model, args[0], other, W)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert not any(configs)


@pytest.mark.slow
def test_a_model(configs, monkeypatch):
    model, args = Own(FEATURES, 32), (torch.randn(NODES, FEATURES), edges(), W)
    expected = gradients(model, model, *args)
    install(monkeypatch, lambda config: Outcome("ok", seconds=0.5 if config else 1.0))
    result = sparsetir.tune(model, *args, trials=2, sampler="random")
    searched = [region.tuned for region in result.regions if region.tuned is not None]
    assert searched and len(searched) == len(Records().all())
    assert all(tuned.speedup == 2 for tuned in searched)
    assert all(0.02 <= region.share < 1 for region in result.regions)
    assert len(str(result).splitlines()) == 1 + len(result.regions)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="sparsetir")
    torch.testing.assert_close(gradients(compiled, model, *args), expected, rtol=1e-4, atol=1e-5)
    recorded = [tuned.config for tuned in searched]
    assert [dict(c) for c in configs if c] and all(dict(c) in recorded for c in configs if c)
    with pytest.raises(ValueError, match="argument 'heads': expected none for a model, got 2"):
        sparsetir.tune(model, *args, heads=2)
    with pytest.raises(ValueError, match="argument 'reduce': expected none for a model, got 'max'"):
        sparsetir.tune(model, *args, reduce="max")
    with pytest.raises(ValueError, match="argument 'target': expected none for a model, got 'cuda"):
        sparsetir.tune(model, *args, target="cuda")
    none = torch.randn(NODES, FEATURES), edges(count=0), W[:0]
    assert not sparsetir.tune(model, *none, trials=2, sampler="random").regions


def test_a_record_that_fails_is_warned_of(configs, monkeypatch, tmp_path):
    model, args = Own(FEATURES, 32), (torch.randn(NODES, FEATURES), edges(), W)
    report = sparsetir.explain(model, *args)
    tuned(monkeypatch, report)
    kernel = Program.kernel

    def fail(self, aligned, config=None):
        if config:
            raise ValueError("gone")
        return kernel(self, aligned, config)

    monkeypatch.setattr(Program, "kernel", fail)
    expected = gradients(model, model, *args)
    torch._dynamo.reset()
    with pytest.warns(RuntimeWarning, match="with the config .* failed: ValueError: gone"):
        grads = gradients(torch.compile(model, backend="sparsetir"), model, *args)
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)


def test_a_region_that_did_not_run(configs):
    model = Own(FEATURES, 32)
    report = sparsetir.explain(model, torch.randn(NODES, FEATURES), edges(count=0), W[:0])
    with pytest.raises(ValueError, match="call: argument 'number': expected a region that ran"):
        report.graphs[0].call(0)
