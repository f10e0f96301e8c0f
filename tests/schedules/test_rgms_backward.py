"""Gradients of relational gather-matmul-scatter for weights: plain programs, their schedule."""

from typing import Any

import numpy as np
import pytest

import sparsetir
from sparsetir.runtime.pipeline import lower, lower_template
from sparsetir.schedules.operators.rgms_backward import RgmsBackward, program
from sparsetir.schedules.template import TEMPLATES
from sparsetir.schedules.templates.rgms_backward import ChunkTiles

RELATIONS, M, N, CHUNK = 4, 11, 9, 3

template = TEMPLATES[ChunkTiles, RgmsBackward]


def arguments(
    problem: RgmsBackward, density: float = 0.4, blocks: int = 1
) -> tuple[dict[str, Any], np.ndarray]:
    """Arguments of the program, and the mask of elements; the second relation has none."""
    rng = np.random.default_rng(0)
    mask = rng.random((RELATIONS, M, N)) < density
    mask[1] = False
    stored = mask.any(axis=2)
    row_ptr = np.append(0, np.cumsum(stored.sum(axis=1)))
    relation, piece_ptr, chunk_ptr = [], [0], []
    for r, (begin, end) in enumerate(zip(row_ptr[:-1], row_ptr[1:], strict=True)):
        for piece in range(begin, end, 2 * CHUNK):
            chunk_ptr += range(piece, min(end, piece + 2 * CHUNK), CHUNK)
            piece_ptr.append(len(chunk_ptr))
            relation.append(r)
    index = {
        "piece_ptr": piece_ptr, "chunk_ptr": [*chunk_ptr, row_ptr[-1]], "rows": stored.nonzero()[1],
        "indptr": np.append(0, np.cumsum(mask.sum(axis=2)[stored])), "indices": mask.nonzero()[2],
    }  # fmt: skip
    index |= {"relation": relation} if problem.edges else {}
    args: dict[str, Any] = {k: np.array(v, problem.idtype) for k, v in index.items()}
    args |= {"m": M, "n": N, "pieces": len(relation), "chunks": len(chunk_ptr), "blocks": blocks}
    features = problem.feat_in, problem.feat
    shapes = {"x": (N, blocks, features[0]), "grad": (M, blocks, features[1])}
    shapes |= {"w": (RELATIONS, blocks, *features[::-1])} if problem.edges else {}
    shapes |= {"a": (int(mask.sum()),)} if problem.weighted and not problem.edges else {}
    types = {k: problem.accumulator if k == "a" else problem.dtype for k in shapes}
    args |= {k: rng.uniform(-1, 1, shape).astype(types[k]) for k, shape in shapes.items()}
    out = (int(mask.sum()),) if problem.edges else (len(relation), blocks, *features)
    args["da" if problem.edges else "dw"] = np.full(out, np.nan, problem.accumulator)
    return args, mask


def check(problem: RgmsBackward, stages: Any, density: float = 0.4, blocks: int = 1) -> None:
    args, mask = arguments(problem, density, blocks)
    sparsetir.build(stages["II scheduled"])(**args)
    x, grad = args["x"].astype(float), args["grad"].astype(float)
    if problem.edges:
        want = np.einsum("jbk,rblk,ibl->rij", x, args["w"].astype(float), grad)[mask]
        result = args["da"]
    else:
        a = np.zeros(mask.shape)
        a[mask] = args.get("a", 1.0)
        want = np.einsum("rij,jbk,ibl->rbkl", a, x, grad)
        result = np.zeros(want.shape)
        relation = [r for r in range(RELATIONS) for _ in range(pieces(mask[r]))]
        np.add.at(result, relation, args["dw"])
    np.testing.assert_allclose(result, want, rtol=1e-4, atol=1e-4)


def pieces(mask: np.ndarray) -> int:
    return -(-int(mask.any(axis=1).sum()) // (2 * CHUNK))


@pytest.mark.parametrize("edges", [False, True])
def test_the_plain_programs(edges: bool) -> None:
    problem = RgmsBackward(5, 3, CHUNK, edges, "float64", "int64", weighted=not edges)
    check(problem, lower(program(problem)))


@pytest.mark.parametrize(
    "edges, sizes, config",
    [(False, (32, 16), ChunkTiles(16, 4, 2)), (False, (4, 48), ChunkTiles(4, 3)),
     (True, (32, 16), ChunkTiles(16, 4, 2)), (True, (1, 8), ChunkTiles(1))],
)  # fmt: skip
@pytest.mark.default(1)
def test_scheduled(edges: bool, sizes: tuple[int, int], config: ChunkTiles) -> None:
    problem = RgmsBackward(*sizes, CHUNK, edges, weighted=sizes[0] != 4)
    check(problem, lower_template(template, problem, config))


@pytest.mark.parametrize("edges", [False, True])
def test_operands_of_16_bits(edges: bool) -> None:
    """Operands in their own type, with sums in float32."""
    problem = RgmsBackward(32, 16, CHUNK, edges, "float16", weighted=not edges)
    check(problem, lower_template(template, problem, ChunkTiles(16, 4, 2)))


def test_no_elements() -> None:
    problem = RgmsBackward(4, 48, CHUNK, weighted=False)
    check(problem, lower_template(template, problem, ChunkTiles(4, 3)), density=0)


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.default("False")
def test_features_in_blocks(edges: bool) -> None:
    """Each piece by its part of the weights, by the plain program and the scheduled one."""
    problem = RgmsBackward(8, 4, CHUNK, edges, weighted=not edges)
    check(problem, lower(program(problem)), blocks=3)
    check(problem, lower_template(template, problem, ChunkTiles(4, 3, 2)), blocks=3)
