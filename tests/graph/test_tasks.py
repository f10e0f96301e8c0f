"""Models of PyG's examples learn through the backend what they learn without it."""

import pytest

pytest.importorskip("torch_geometric")

from bench.examples import OFF, OURS, PYG, Training
from bench.tasks import EXAMPLES

EPOCHS = {"DNA": 15, "infomax": 15, "MixHop": 15, "TAGCN": 15, "ARMA": 15}  # others: 40


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name):
    theirs, ours = (Training(EXAMPLES[name], way) for way in (PYG, OURS))
    theirs.begin(1)
    expected = [theirs.epoch() for _ in range(4)]
    ours.begin(1)
    assert [ours.epoch() for _ in range(4)] == pytest.approx(expected, rel=OFF)
    assert any(g.found or g.left for g in ours.backend.graphs)
    for _ in range(EPOCHS.get(name, 40)):
        ours.epoch()
    assert ours.score() > 0.85 * EXAMPLES[name].least
