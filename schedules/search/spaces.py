"""The joint space of formats and schedules that a search goes through. (SparseTIR, section 2)

A point says which template (a branch of the space) and a choice for each of its parameters; it is
flat, and its values are scalars that JSON holds. Not every point is a config: choices may not go
together. Every config of a space can be made, and its template takes the problem and the pattern.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sparsetir import formats
from sparsetir.formats.format import REGISTRY
from sparsetir.schedules.default import is_gpu, vector_bits
from sparsetir.schedules.gpu.features import vector_width
from sparsetir.schedules.gpu.sddmm import FusedNonzeros
from sparsetir.schedules.gpu.spmm import RowSplit
from sparsetir.schedules.gpu.spmm_groups import SPLITS, Groups
from sparsetir.schedules.gpu.spmm_hyb import HybRows, shares_rows
from sparsetir.schedules.operators.problems import CsrPattern, Sddmm, Spmm
from sparsetir.schedules.operators.spmv import serves as slices_serve
from sparsetir.schedules.registers import served, sum_vectors, tasks
from sparsetir.schedules.search.by_format import is_full, traits_of
from sparsetir.schedules.search.choose import Statistics, candidates
from sparsetir.schedules.search.choose_sorted import sorted_choices
from sparsetir.schedules.search.panel_space import gpu_panel_choices, panel_choices
from sparsetir.schedules.template import BRANCH, Branch, Point
from sparsetir.schedules.templates import decomposed
from sparsetir.schedules.templates.decomposed import Decomposed
from sparsetir.schedules.templates.register_tile import MAX_TILE
from sparsetir.schedules.templates.registry import TEMPLATES
from sparsetir.schedules.templates.sddmm import SddmmGroups
from sparsetir.schedules.templates.spmm import RowBlocks
from sparsetir.schedules.templates.spmm_blocks import BlockRows
from sparsetir.schedules.templates.spmv import SlicedRows
from sparsetir.sparse_ir.rows import ROWS_FROM

# Vectors of a tile.
VECTORS = (1, 2, 4, 8, 16)
# Multiplications from which on a single thread is not tried where there are more.
SERIAL_WORK = 1 << 24
THREADS_OF_A_BLOCK = 128


@dataclass(frozen=True)
class Space:
    """The configs that may serve a problem, by branches."""

    branches: tuple[Branch, ...]

    def config(self, point: Point) -> Any | None:
        """The config of a point; None where the choices do not go together.

        Raises ValueError for what is no point of this space.
        """
        branch = next((b for b in self.branches if b.name == point.get(BRANCH)), None)
        if branch is None:
            known = ", ".join(b.name for b in self.branches)
            raise ValueError(
                f"Space.config: expected a point with '{BRANCH}' of {known}, got {point}"
            )
        chosen = {}
        for name, values in branch.choices.items():
            key = f"{branch.name}.{name}"
            if key not in point or point[key] not in values:
                raise ValueError(
                    f"Space.config: expected a point with '{key}' of {values}, got {point}"
                )
            chosen[name] = point[key]
        return branch.config(chosen)

    def point(self, config: Any) -> Point | None:
        """A point that gives a config; None if the space has none."""
        return self._points.get(config)

    def points(self) -> list[tuple[Point, Any]]:
        """Every config once, with the first point that gives it; always in the same order."""
        return [(point, config) for config, point in self._points.items()]

    @cached_property
    def _points(self) -> dict[Any, Point]:
        found: dict[Any, Point] = {}
        for branch in self.branches:
            for point, config in branch.points():
                found.setdefault(config, point)
        return found


def space(problem: Any, pattern: CsrPattern, given: Statistics, target: Any) -> Space:
    """The space of a problem, for a pattern and a target.

    given : of the pattern, as `choose` takes it. What `candidates` gives is always in the space.
    """
    known = candidates(problem, given, target)
    gpu = is_gpu(target)
    others = _plugged_in(problem, pattern, given, target)
    if isinstance(problem, Sddmm):
        return Space((_fused_nonzeros(known) if gpu else _groups(known, given), *others))
    lanes, most = (0, 0) if gpu else (_lanes(known), sum_vectors(vector_bits(target)))
    stored = _decomposed(problem, pattern, given.feat, lanes, most)
    branches: list[Branch | None]
    if gpu:
        branches = [_row_split(known, given), _hyb_rows(known, problem)]
        branches.append(_thread_groups(problem, given))
        name, panels = "PanelThreads", gpu_panel_choices(problem, given)
    else:
        by_length = sorted_choices(known, given)
        branches = [_row_blocks(known, given), _block_rows(known, given)]
        branches.append(None if by_length is None else Branch("SortedRows", *by_length))
        if given.feat == 1 and slices_serve(problem):
            branches.insert(0, _sliced_rows(known, given))
        name, panels = "PanelRows", panel_choices(problem, known, given, _lanes(known))
    branches += [None if panels is None else Branch(name, *panels), stored]
    return Space((*(b for b in branches if b is not None), *others))


def _plugged_in(
    problem: Any, pattern: CsrPattern, given: Statistics, target: Any
) -> Iterator[Branch]:
    """A branch for each template that names its configs; its one parameter is their number."""
    for template in TEMPLATES.values():
        if template.configs is not None and template.fits(problem, is_gpu(target)):
            found = tuple(template.configs(problem, pattern, given, target))
            if not found:
                continue
            numbers = {"config": tuple(range(len(found)))}
            yield Branch(
                template.config.__name__, numbers, lambda config, found=found: found[config]
            )


def _row_blocks(known: list[Any], given: Statistics) -> Branch:
    """Tiles of whole vectors, and those of the candidates.

    order : "rows", all tiles of a row, then the next row; "tiles", all rows for a tile; "packed",
        the same with the tile's features of B copied together
    blocks : of rows, for each thread; 0 for a kernel on one thread
    """
    known = [c for c in known if isinstance(c, RowBlocks)]
    lanes, feat = known[0].lanes, given.feat
    widths = {min(feat, v * lanes, MAX_TILE) for v in VECTORS} | {c.tile for c in known}

    def make(tile: int, order: str, prefetch: int, parts: int, blocks: int) -> RowBlocks:
        tiles = -(-feat // tile)
        pack = order == "packed"
        in_turn = pack or (order == "tiles" and tiles > 1)
        return RowBlocks(
            tile=tile, lanes=lanes, feat=feat if tile == feat else served(feat, tile, lanes),
            pack=pack, tiles_first=in_turn, prefetch=prefetch, parts=parts, parallel=blocks > 0,
            blocks=tasks(given.threads, tiles if in_turn else 1, blocks),
            ahead=given.ahead if blocks > 0 and (order == "rows" or tiles == 1) else 0,
        )  # fmt: skip

    choices = {
        "tile": tuple(sorted(widths)),
        "order": ("rows", "tiles", "packed"),
        "prefetch": (0, 8, 16),
        "parts": (1, 4),
        "blocks": _blocks(given),
    }
    return Branch("RowBlocks", choices, make)


def _block_rows(known: list[Any], given: Statistics) -> Branch | None:
    """Full blocks of the largest size and of a half of it, around the candidate, if there is one.

    blocks : as of row blocks, the rows of DBSR in one piece
    """
    default = next((c for c in known if isinstance(c, BlockRows)), None)
    if default is None:
        return None
    sizes = _sorted(given.block, max(2, given.block // 2))
    found = {f.name: f for kind in (formats.BSR, formats.DBSR) for f in (kind(n, n) for n in sizes)}
    lanes, feat = default.lanes, given.feat

    def make(format: str, tile: int, blocks: int, **others: Any) -> BlockRows | None:
        fmt = found[format]
        if isinstance(fmt, formats.DBSR) and blocks > 1:
            return None
        parts = tasks(given.threads, -(-feat // tile), blocks)
        return replace(
            default, format=fmt, tile=tile, feat=served(feat, tile, lanes), parallel=blocks > 0,
            blocks=parts if isinstance(fmt, formats.BSR) else 1, **others,
        )  # fmt: skip

    choices = {
        "format": tuple(found),
        "tile": _sorted(default.tile, *(min(feat, v * lanes) for v in (2, 4))),
        "rows": _sorted(2, 4, 8, default.rows),
        "pack": (False, True),
        "blocks": _blocks(given),
    }
    return Branch("BlockRows", choices, make)


def _blocks(given: Statistics) -> tuple[int, ...]:
    """Blocks of rows for each thread that are tried; 0 for a kernel on one thread."""
    several = () if given.threads == 1 else (1, 4)
    serial = not several or given.nnz * given.feat < SERIAL_WORK
    return (0, *several) if serial else several


def _sliced_rows(known: list[Any], given: Statistics) -> Branch:
    default = next(c for c in known if isinstance(c, SlicedRows))
    choices = {
        "lanes": _sorted(max(1, default.lanes // 2), default.lanes, 2 * default.lanes),
        "long": _sorted(64, 128, 256, 1024, default.long),
        "window": _sorted(512, 4096, 32768, default.window),
        "blocks": _sorted(1, default.blocks, given.threads, 4 * given.threads),
        "ahead": _sorted(0, default.ahead),
        "prefetch": _sorted(0, SlicedRows.prefetch),
    }
    return Branch("SlicedRows", choices, SlicedRows)


def _groups(known: list[SddmmGroups], given: Statistics) -> Branch:
    """Tiles of whole `vectors`; 0 for a kernel for this feature size alone."""
    default, feat = known[0], given.feat
    fitting = [v for v in VECTORS if feat % (v * default.lanes) == 0]

    def make(lanes: int, group: int, vectors: int, parts: int, pack: bool) -> SddmmGroups:
        if not vectors:
            vectors = SddmmGroups.vectors_of(feat, lanes)
            return SddmmGroups(lanes, group, vectors, feat, parts, pack)
        return SddmmGroups(lanes, group, vectors, None, parts, pack)

    choices = {
        "lanes": _sorted(default.lanes, max(1, default.lanes // 2)),
        "group": _sorted(default.group, *(g for g in (4, 8, 16) if g <= default.lanes)),
        "vectors": _sorted(0, *fitting),
        "parts": _sorted(1, 4, 16, *(c.parts for c in known)),
        "pack": (False, True),
    }
    return Branch("SddmmGroups", choices, make)


def _row_split(known: list[Any], given: Statistics) -> Branch:
    rows = [c for c in known if isinstance(c, RowSplit)]
    default, feat = rows[0], given.feat
    widths = [t for t in (8, 16, 32, 64) if t <= 2 * (feat // default.vector)]

    def make(rows: int, **others: Any) -> RowSplit:
        return replace(default, rows_per_block=rows, **others)

    choices = {
        "threads": _sorted(default.threads, *widths),
        "rows": _sorted(1, 2, 4, 8, *(c.rows_per_block for c in rows)),
        "vector": _sorted(default.vector, max(1, default.vector // 2)),
        "coarsen": (1, 2),
        "row_cache": (False, True),
        "occupancy": (None, 1024),
    }
    return Branch("RowSplit", choices, make)


def _hyb_rows(known: list[Any], problem: Spmm) -> Branch | None:
    """Around the candidates, of which there are none for heads."""
    found = [c for c in known if isinstance(c, HybRows)]
    if not found:
        return None
    default, shares = found[0], shares_rows(problem)
    near = (max(0, default.k - 1), default.k + 1) if shares else ()

    def make(rows: int, **others: Any) -> HybRows:
        return replace(default, rows_per_block=rows, **others)

    choices = {
        "c": (1, 2, 4) if shares else (1,),
        "k": _sorted(default.k, *near),
        "rows": _sorted(2, 8, default.rows_per_block),
        "coarsen": (1, 2),
        "unroll": (4, 8),
        "occupancy": (None, 1024),
    }
    return Branch("HybRows", choices, make)


def _thread_groups(problem: Spmm, given: Statistics) -> Branch:
    """Sgap's algorithms (x and g of which are `work`, and g of {1/g row} is `lanes`).

    Without those for which there are no atomics, and threads of a row that each add for themselves.
    """
    wide = vector_width(given.feat, problem.dtype)

    def make(**fields: Any) -> Groups | None:
        if fields["rows"] != "table" and fields["split"] == "rows":
            return None
        config = Groups.for_features(given.feat, problem.dtype, **fields)
        alone = config.split == "rows" and config.group == 1 < config.lanes
        fits = config.coarsen == 1 or config.coarsen * config.vector <= given.feat
        return config if fits and not alone and config.serves(problem) else None

    choices = {
        "split": SPLITS,
        "work": (1, 2, 4, 16),
        "lanes": (1, 4, 8, 32),
        "group": (1, 4, 8, 32),
        "vector": _sorted(wide, max(1, wide // 2)),
        "coarsen": (1, 2),
        "block": (128, 256),
        "rows": ROWS_FROM,
    }
    return Branch("Groups", choices, make)


def _fused_nonzeros(known: list[FusedNonzeros]) -> Branch:
    default = known[0]

    def make(threads: int, **others: Any) -> FusedNonzeros:
        return replace(default, threads=threads, groups=THREADS_OF_A_BLOCK // threads, **others)

    choices = {
        "threads": _sorted(4, 8, 16, 32, default.threads),
        "work": _sorted(1, 2, 4, 8, default.work),
        "vector": _sorted(default.vector, max(1, default.vector // 2)),
        "coarsen": _sorted(1, 2, 4, default.coarsen),
        "occupancy": (None, 768, 1024),
    }
    return Branch("FusedNonzeros", choices, make)


def _sorted(*values: int) -> tuple[int, ...]:
    return tuple(sorted(set(values)))


def _decomposed(
    problem: Any, pattern: CsrPattern, feat: int, lanes: int, most: int
) -> Branch | None:
    """The formats of the library that do not pad the pattern too much, by name.

    lanes : of a vector; 0 where there are no tiles in registers
    most : vectors of sums that stay there
    tile : features; 0 for the default schedule alone, as all others are where the format's rows
        come after its columns
    """
    if decomposed.serves(problem) is not None:
        return None
    stored = pattern.coordinates
    found, filled = {}, set()
    counts: dict[Any, int] = {}  # DBSR has the places of BSR
    for fmt in (f for entry in REGISTRY.values() for f in entry.search(stored)):
        key = (fmt.rows, fmt.cols) if isinstance(fmt, formats.BSR | formats.DBSR) else fmt
        if key not in counts:
            counts[key] = fmt.places(stored)
        if decomposed.refusal(fmt, stored, problem, counts[key]) is None:
            found[fmt.name] = fmt
            if is_full(fmt, stored, counts[key]):
                filled.add(fmt.name)

    def make(format: str, tile: int) -> Decomposed:
        fmt, traits = found[format], traits_of(found[format])
        full = format in filled
        tile = min(tile, max(1, most // traits.rows) * lanes)
        if not tile or not traits.rows_first:
            return Decomposed(fmt, filled=full)
        return Decomposed(fmt, tile, lanes, served(feat, tile, lanes), full)

    tiles = {min(feat, v * lanes) for v in (2, 8) if lanes > 1}
    return Branch("Decomposed", {"format": tuple(found), "tile": (0, *sorted(tiles))}, make)


def _lanes(known: list[Any]) -> int:
    return next(c.lanes for c in known if isinstance(c, RowBlocks))
