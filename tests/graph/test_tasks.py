"""Models of PyG's examples learn through the backend what they learn without it."""

import pytest

pytest.importorskip("torch_geometric")

from bench.examples import OFF, OURS, PYG, Training
from bench.tasks import EXAMPLES

EPOCHS, NEAR = 12, 0.06  # scores of so few differ by what is rounded


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
    for training in (theirs, ours):
        training.begin(2)
        for _ in range(EPOCHS):
            training.epoch()
    assert ours.score() == pytest.approx(theirs.score(), abs=NEAR)
