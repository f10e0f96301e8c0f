"""Graphs on several processes give what one process gives."""

import importlib.util
import itertools

import pytest
import torch
import torch.distributed

from distributed import checks
from distributed.team import Team
from pairs import by_default
from sparsetir.distributed import DistGraph
from sparsetir.distributed.collectives import check_device
from sparsetir.extras import install_hint

KINDS = ["random", "no edges", "three nodes", "one target", "one source", "no nodes"]
PARTITIONS = ["rows", "given", "shares", "last"]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def each(check, size=None, **choices):
    """The whole product; slow but for a few in which each value occurs."""
    values = list(choices.values())
    longest = max(map(len, values), default=1)
    default = {tuple(v[i % len(v)] for v in values) for i in range(longest)}
    return [
        pytest.param(check, these, size, marks=[] if these in default else [pytest.mark.slow],
                     id="-".join(map(str, (check.__name__.removeprefix("test_"), *these))))
        for these in itertools.product(*values)
    ]  # fmt: skip


REDUCTIONS = ["sum", "mean", "max", "min"]
OPERANDS = ["none", "x", "values", "x and values", "no values", "x, no values"]
TWO = {"dtype": [torch.float32, torch.bfloat16], "heads": [False, True]}
TWO = {"kind": KINDS[:4], "partition": PARTITIONS[:2], **TWO}
HALVES = [torch.float16, torch.bfloat16]
CHECKS = [
    *each(checks.test_edges_are_where_their_targets_are, kind=KINDS, partition=PARTITIONS),
    *each(checks.test_edges_are_where_their_targets_are, 1, kind=["random"], partition=["shares"]),
    *each(checks.test_edges_are_where_their_targets_are, 3, kind=["random"], partition=["shares"]),
    *each(checks.test_rows_there_and_back, partition=["rows", "shares"]),
    *each(checks.test_coalesced),
    *each(checks.test_spmm, 3, kind=KINDS[:5], reduce=REDUCTIONS, dtype=DTYPES, heads=OPERANDS),
    *each(checks.test_sddmm, 3, **TWO),
    *each(checks.test_softmax, kind=["random", "no edges"]),
    *each(checks.test_sddmm, 3, **TWO, attention=[True]),
    *each(checks.test_infinities_and_nan),
    *each(checks.test_in_pieces, 2, most=[64, 2]),
    *each(checks.test_gradients_of_halos_go_first, 3),
    *each(checks.test_gradients_that_others_have_stay, 3),
    *each(checks.test_bytes),
    *each(checks.test_exchange_in_16_bits, dtype=HALVES),
    *each(checks.test_layers, kinds=["gcn sage"], weighted=[True]),
    *each(checks.test_layers, kinds=["gat", "rgcn"], weighted=[False]),
    *each(checks.test_what_layers_give),
]


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    processes = Team(4, tmp_path_factory.mktemp("team"))
    yield processes
    processes.close()


@pytest.mark.parametrize("check, args, size", CHECKS)
def test_one_process_gives_the_same(team, check, args, size):
    team(check, *args, size=size)


@pytest.mark.parametrize("kind", by_default(["sage", "gat", "gcn"], "sage", "gat"))
@pytest.mark.parametrize("epochs", by_default([10, 50], 10))
def test_losses_of_epochs(team, kind, epochs):
    """The losses of one process with the whole graph, to rounding."""
    for size, partition in ((1, "rows"), (2, "given"), (4, "rows")):
        results = team(checks.test_losses, kind, partition, "random", epochs, size=size)
        assert all(losses == results[0] for losses in results)  # processes know the same


@pytest.mark.parametrize("kind", by_default(["sage", "gat", "gcn"], "gat"))
@pytest.mark.parametrize("edges, partition", [
    ("three nodes", "rows"),  # fewer than processes
    pytest.param("random", "last", marks=pytest.mark.slow),  # one has them all
    pytest.param("no edges", "given", marks=pytest.mark.slow),
])  # fmt: skip
def test_losses_where_some_have_nothing(team, kind, edges, partition):
    results = team(checks.test_losses, kind, partition, edges, 5)
    assert all(losses == results[0] for losses in results)


@pytest.mark.slow  # minutes
@pytest.mark.parametrize("kind", ["sage", "gat"])
def test_losses_of_50_epochs_on_cora(team, kind):
    for size in (1, 2, 4):
        team(checks.test_losses, kind, "rows", "cora", size=size, seconds=300)


def test_saved_on_four_loaded_on_two(team, tmp_path):
    path = str(tmp_path / "checkpoint")
    team(checks.save_checkpoint, path)
    for partition in ("given", "rows"):
        team(checks.load_checkpoint, path, partition, size=2)


def test_wrong_on_one_process(team):
    for first, *others, wrong in zip(*team(checks.test_wrong_on_one_process), strict=True):
        words, message = wrong
        assert words in message, wrong
        for _, other in (first, *others):
            if words == "expected each node once" and "from_edges" in message:
                assert words in other  # each process names each node: all are wrong
            else:
                assert other.startswith("DistributedError: "), (wrong, other)
                # Which of several is wrong cannot be known.
                assert "the same on" in words or "process " in other, (wrong, other)


def test_layers_refuse(team):
    for flow, rows in team(checks.test_layers_refuse):
        assert "SAGEConv: argument 'edge_index': expected edges (2, E) with flow=" in flow
        assert "expected a DistGraph of 99 own nodes as the features of sources have rows" in rows


def test_without_processes():
    with pytest.raises(RuntimeError, match="run under torchrun and call .*init_process_group"):
        DistGraph.from_edges(torch.zeros(2, 3, dtype=torch.int64))


@pytest.mark.parametrize("engine, wanted", [("nccl", "cuda"), ("gloo", "cpu")])
def test_tensors_are_where_their_engine_is(monkeypatch, engine, wanted):
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: engine)
    x = torch.empty(1, device="meta")
    with pytest.raises(ValueError, match=f"'x': expected to be on {wanted}, as .* by {engine}"):
        check_device("f", "x", None, x)


def test_metis(team):
    pytest.importorskip("pymetis")
    team(checks.test_metis)


def test_without_metis(team):
    if importlib.util.find_spec("pymetis") is None:
        for text in team(checks.test_without_metis):
            assert f"run `{install_hint('metis', 'pymetis')}`" in text


def test_second_derivatives_are_refused(team):
    for text in team(checks.test_twice_differentiated):
        assert "once_differentiable" in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sage", "gat", "gcn"])
def test_compiled(team, kind):
    for text in team(checks.test_compiled, kind, size=2):
        assert "should not be traced" in text and ("spmm" in text or "with_halo" in text), text


@pytest.mark.slow
@pytest.mark.parametrize(
    "width, graphs", [(8, 1), (600, 2)]
)  # of more than 1 MiB: dynamo splits it
def test_data_parallel(team, width, graphs):
    for regions in team(checks.test_data_parallel, width, size=2):
        assert len(regions) == graphs and all(regions)


def test_wrong_later(team):
    for text in team(checks.test_wrong_later, size=3):
        assert "expected the same on all processes" in text and "process 1" in text


@pytest.mark.parametrize("how, where", [
    ("killed", "backward"),
    *(pytest.param(*these, marks=pytest.mark.slow) for these in [
        ("killed", "forward"), ("stopped", "forward"), ("stopped", "backward"),
        ("raises", "forward"), ("raises", "backward"), ("differs", "forward"),
    ]),
])  # fmt: skip
def test_a_process_that_fails(tmp_path, how, where):
    """The others get an error that says so: at once, or when the time of the group is over."""
    seconds = 60 if how == "killed" else 3
    team = Team(3, tmp_path, seconds)
    try:
        team.begin(checks.fails_alone, how, where)
        for rank in (0, 2):
            assert team.pipes[rank].poll(40)
            failed, answer = team.pipes[rank].recv()
            assert failed is None, failed
            text, waited = answer
            assert waited < (10 if how == "killed" else 2 * seconds + 5)
            assert "another process has ended, was not there in time" in text, text
        if how in ("raises", "differs"):
            assert team.pipes[1].poll(40)
            failed, (text, _) = team.pipes[1].recv()
            assert "has had enough" in text if how == "raises" else "DistributedError" in text
    finally:
        team.close()
