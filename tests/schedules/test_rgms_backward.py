"""Gradients of relational gather-matmul-scatter for weights: derived programs, their schedule."""

from typing import Any

import numpy as np
import pytest

import sparsetir
from sparsetir.runtime.pipeline import lower_template
from sparsetir.schedules.operators.rgms import RgmsGradient
from sparsetir.schedules.template import TEMPLATES
from sparsetir.schedules.templates.rgms_backward import ChunkTiles
from sparsetir.sparse_ir.translate import Translator

RELATIONS, M, N, ROWS = 4, 11, 9, 3

template = TEMPLATES[ChunkTiles, RgmsGradient]


def problem_of(edges: bool, weighted: bool = True, *types: str) -> RgmsGradient:
    return RgmsGradient(*types, weighted=weighted and not edges, edges=edges, in_blocks=True)


def arguments(
    problem: RgmsGradient, sizes: tuple[int, int], density: float = 0.4, blocks: int = 1
) -> tuple[dict[str, Any], np.ndarray]:
    """Arguments of the program, and the mask of elements; the second relation has none."""
    rng = np.random.default_rng(0)
    mask = rng.random((RELATIONS, M, N)) < density
    mask[1] = False
    stored = mask.any(axis=2)
    row_ptr = np.append(0, np.cumsum(stored.sum(axis=1)))
    relation, piece_ptr = [], [0]
    for r, (begin, end) in enumerate(zip(row_ptr[:-1], row_ptr[1:], strict=True)):
        for piece in range(begin, end, 2 * ROWS):
            piece_ptr.append(min(end, piece + 2 * ROWS))
            relation.append(r)
    index = {
        "row_ptr": piece_ptr, "rows": stored.nonzero()[1],
        "indptr": np.append(0, np.cumsum(mask.sum(axis=2)[stored])), "indices": mask.nonzero()[2],
    }  # fmt: skip
    index |= {"relation": relation} if problem.edges else {}
    args: dict[str, Any] = {k: np.array(v, problem.idtype) for k, v in index.items()}
    args |= {"m": M, "n": N, "blocks": blocks, "feat_in": sizes[0], "feat": sizes[1]}
    args |= {"pieces": len(relation)} if problem.edges else {}
    args |= {"relations": RELATIONS if problem.edges else len(relation)}
    shapes = {"x": (N, blocks, sizes[0]), "grad": (M, blocks, sizes[1])}
    shapes |= {"w": (RELATIONS, blocks, *sizes[::-1])} if problem.edges else {}
    shapes |= {"a": (int(mask.sum()),)} if problem.weighted else {}
    types = {k: problem.values or problem.dtype if k == "a" else problem.dtype for k in shapes}
    args |= {k: rng.uniform(-1, 1, shape).astype(types[k]) for k, shape in shapes.items()}
    out = (int(mask.sum()),) if problem.edges else (len(relation), blocks, *sizes)
    args["out"] = np.full(out, np.nan, problem.accumulator)
    return args, mask


def check(
    problem: RgmsGradient, sizes: tuple[int, int], stages: Any, density: float = 0.4,
    blocks: int = 1,
) -> None:  # fmt: skip
    args, mask = arguments(problem, sizes, density, blocks)
    sparsetir.build(stages["II scheduled"])(**args)
    x, grad = args["x"].astype(float), args["grad"].astype(float)
    result = args["out"]
    if problem.edges:
        want = np.einsum("jbk,rblk,ibl->rij", x, args["w"].astype(float), grad)[mask]
    else:
        a = np.zeros(mask.shape)
        a[mask] = args.get("a", 1.0)
        want = np.einsum("rij,jbk,ibl->rbkl", a, x, grad)
        result = np.zeros(want.shape)
        relation = [r for r in range(RELATIONS) for _ in range(pieces(mask[r]))]
        np.add.at(result, relation, args["out"])
    np.testing.assert_allclose(result, want, rtol=1e-4, atol=1e-4)


def pieces(mask: np.ndarray) -> int:
    return -(-int(mask.any(axis=1).sum()) // (2 * ROWS))


def tiles(sizes: tuple[int, int], *config: int) -> ChunkTiles:
    return ChunkTiles(*sizes, ROWS, *config)


@pytest.mark.parametrize(
    "edges, sizes, config",
    [(False, (32, 16), (16, 4, 2)), (False, (4, 48), (4, 3)), (True, (32, 16), (16, 4, 2)),
     (True, (1, 8), (1,))],
)  # fmt: skip
@pytest.mark.default(1)
def test_scheduled(edges: bool, sizes: tuple[int, int], config: tuple[int, ...]) -> None:
    problem = problem_of(edges, sizes[0] != 4)
    check(problem, sizes, lower_template(template, problem, tiles(sizes, *config)))


def test_places_are_counted_rather_than_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of a row in its tile is that of the visit: no kernel takes the table of places."""
    problem, config = problem_of(False), tiles((4, 4), 4)
    assert "I_places_of" not in lower_template(template, problem, config)["III"].script()
    monkeypatch.setattr(Translator, "_place", lambda *_: None)
    assert "I_places_of" in lower_template(template, problem, config)["III"].script()
