"""Pictures of patterns and formats: where places lie, what is drawn, and what the legend says."""

import io
import subprocess
import sys
from xml.dom.minidom import parseString

import numpy as np
import pytest
import scipy.sparse
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from zoo import MATRICES, TENSORS

from pairs import by_turns
from sparsetir import SparseMatrix
from sparsetir.extras import WITHOUT_TORCH, install_hint
from sparsetir.formats import (
    BSR,
    CSR,
    SRBCRS,
    EnumeratedPatterns,
    Hyb,
    Mixture,
    Pattern,
    by_block_fill,
)
from sparsetir.formats.coo import COO
from sparsetir.formats.csc import CSC
from sparsetir.formats.csf import CSF
from sparsetir.formats.dcsr import DCSR
from sparsetir.formats.dia import DIA
from sparsetir.formats.ell import ELL
from sparsetir.formats.infer_indices import infer_format
from sparsetir.formats.make_rules import Operand, dense, fixed, make_rule, sparse
from sparsetir.formats.ragged_rows import Ragged
from sparsetir.formats.row_ell import RowELL
from sparsetir.formats.sell import SELL
from sparsetir.plotting import marks as plot_marks
from sparsetir.plotting import patterns as plot
from sparsetir.plotting.layout import Window, locate, storage_layout
from sparsetir.plotting.patterns import plot_format, plot_pattern

FORMATS = [
    BSR(1, 1), BSR(4, 4), BSR(3, 5), COO(), CSC(), CSF((1, 0)), CSR(), DCSR(), DIA(), ELL(),
    EnumeratedPatterns(4), Hyb(1, 0), Hyb(2, 2), Ragged(), RowELL(4),
    SELL(2, 4), SRBCRS(4, 3),
    Mixture("mixed", (BSR(4, 4), Hyb(1, 2)), by_block_fill(4, 4, 0.4)),
]  # fmt: skip
BLUE, ORANGE = (np.array(to_rgb(c)) for c in plot_marks.COLOURS[:2])


def tint(colour, strength=plot_marks.TINT):
    return 1 - strength * (1 - colour)


def pattern_of(rows, cols, shape):
    return Pattern([np.asarray(rows), np.asarray(cols)], shape)


def panel_rule():
    """Columns and rows of a panel both below the panel: most pairs of them are no place."""
    return make_rule(
        "panels", Operand(), [dense("IO"), sparse("JO", "IO"), fixed("II", "IO", 4)],
        {"I": ["IO", "II"], "J": ["JO"]},
        lambda i, j: (i // 4, j, i % 4), lambda io, j, ii: (io * 4 + ii, j),
    )  # fmt: skip


def check_located(part, pattern):
    """Elements lie where they were; what a rule pads has the place that inference would give it."""
    stored = np.flatnonzero(part.places >= 0)
    where = locate(part, part.places[stored])
    assert where.valid.all()
    np.testing.assert_array_equal(where.rows, pattern.coords[0][stored])
    np.testing.assert_array_equal(where.cols, pattern.coords[1][stored])
    where = locate(part, np.arange(part.size))
    if not part.rule.masked:
        np.testing.assert_array_equal(where.valid, part.mask.reshape(-1) == 1)
        return
    inside = where.valid & (where.rows >= 0) & (where.rows < pattern.shape[0])
    inside &= (where.cols >= 0) & (where.cols < pattern.shape[1])
    again = infer_format(part.rule, [where.rows[inside], where.cols[inside]], pattern.shape)
    assert again.size == part.size
    np.testing.assert_array_equal(again.places, np.flatnonzero(inside))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_places_lie_where_the_rule_says(fmt):
    for pattern in MATRICES.values():
        for part in fmt.convert(pattern).parts:
            check_located(part, pattern)


def test_places_below_a_shared_axis():
    mask = np.zeros((8, 3), bool)
    mask[[0, 2, 5], [0, 1, 2]] = True
    pattern = pattern_of(*np.nonzero(mask), mask.shape)
    part = infer_format(panel_rule(), pattern.coords, pattern.shape)
    where = locate(part, np.arange(part.size))
    # Panel 0 has 2 rows and 2 columns, panel 1 has 1 row and one slot without a row.
    pairs = set(zip(where.rows[where.valid].tolist(), where.cols[where.valid].tolist()))
    assert pairs == {(0, 0), (0, 1), (2, 0), (2, 1), (5, 2)}
    assert np.count_nonzero(where.valid) == 5 and part.size == 3 * 4
    places = locate(part, part.places)
    np.testing.assert_array_equal(np.stack([places.rows, places.cols]), np.stack(pattern.coords))


def drawn(ax):
    """Centres of the squares in a panel, (column, row), by colour of their faces."""
    out = {}
    for squares in ax.collections:
        assert isinstance(squares, PolyCollection)
        (face,) = squares.get_facecolor()
        centres = out.setdefault(tuple(np.round(face[:3], 4)), [])
        centres += [tuple(np.round(p.vertices[:4].mean(0), 3)) for p in squares.get_paths()]
    return {c: sorted(v) for c, v in out.items()}


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def key(colour):
    return tuple(np.round(colour, 4))


def points(mask):
    rows, cols = np.nonzero(mask)
    return sorted(zip(cols.tolist(), rows.tolist()))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_every_element_is_drawn_once(fmt):
    for name in ("random", "one dense row", "one column", "no rows", "no columns"):
        pattern = MATRICES[name]
        figure = plot_format(fmt.convert(pattern))
        small = max(pattern.shape) <= plot.SMALL
        assert isinstance(figure, Figure) and len(figure.axes) == (2 if small else 3)
        if not small:
            continue
        faces = drawn(figure.axes[0])
        colours = {key(to_rgb(c)) for c in plot_marks.COLOURS}
        centres = sorted(c for face in colours & set(faces) for c in faces[face])
        assert centres == sorted(zip(*(c.tolist() for c in pattern.coords[::-1]))), name


def test_blocks_are_drawn_in_the_matrix_and_in_the_storage():
    mask = np.zeros((5, 6), bool)
    mask[0, 0] = mask[1, 4] = mask[4, 5] = True
    pattern = pattern_of(*np.nonzero(mask), mask.shape)
    matrix, storage = plot_format(BSR(2, 3).convert(pattern)).axes
    blocks = np.kron([[1, 1], [0, 0], [0, 1]], np.ones((2, 3))).astype(bool)
    inside = np.zeros((6, 6), bool)
    inside[:5] = mask
    # The last block stands out by a row.
    assert drawn(matrix) == {key(tint(BLUE)): points(blocks & ~inside), key(BLUE): points(inside)}
    assert matrix.get_ylim()[0] > 5.5 and matrix.get_ylim()[1] < 0
    gap = 0.5
    stored = [(0, 0), (3 + gap + 1, 1), (2, 4 + 2 * gap)]
    faces = drawn(storage)
    assert faces[key(BLUE)] == sorted(stored)
    assert len(faces[key(tint(BLUE))]) == 3 * 6 - 3


def test_slots_without_a_coordinate_are_hatched():
    pattern = pattern_of([0, 0, 1], [1, 3, 2], (2, 4))
    figure = plot_format(ELL().convert(pattern))
    matrix, storage = figure.axes
    assert drawn(matrix) == {key(BLUE): [(1, 0), (2, 1), (3, 0)]}
    assert drawn(storage) == {key(BLUE): [(0, 0), (0, 1), (1, 0)], (1.0, 1.0, 1.0): [(1, 1)]}
    assert [c.get_hatch() for c in storage.collections] == ["////", None]
    assert legend(figure) == ["ell: 3 elements, 25.0 % padding", "slots without a coordinate"]


def test_storage_layout_keeps_places_apart():
    for name in ("random", "one dense column", "one row", "all stored", "nothing stored"):
        pattern = MATRICES[name]
        for fmt in FORMATS:
            parts = [p for p in fmt.convert(pattern).parts if p.size]
            layout = storage_layout(parts, pattern.shape[0])
            if layout is None:
                continue
            x = np.concatenate([s.x for s in layout.parts] or [np.zeros(0)])
            y = np.concatenate([s.y for s in layout.parts] or [np.zeros(0)])
            assert len(set(zip(x.tolist(), y.tolist()))) == len(x) == sum(p.size for p in parts)
            assert x.max(initial=0) < layout.width and y.max(initial=0) < layout.height
            close = np.abs(x[:, None] - x) + np.abs(y[:, None] - y)
            assert (close[~np.eye(len(x), dtype=bool)] > 0.99).all()


def test_legend_says_what_is_stored():
    # Rows of 1, 2 and 3 elements, one to each bucket.
    pattern = pattern_of([0, 1, 1, 2, 2, 2], [3, 0, 4, 1, 2, 5], (3, 6))
    figure = plot_format(Hyb(1, 2).convert(pattern))
    assert legend(figure) == [
        "rows of 1: 1 element, 0.0 % padding",
        "rows of 2: 2 elements, 0.0 % padding",
        "rows of 3 to 4, and pieces: 3 elements, 25.0 % padding",
        "slots without a coordinate",
    ]


def test_legend_joins_small_parts():
    rng = np.random.default_rng(0)
    lengths = np.repeat([1, 2, 3, 6, 12], [30, 25, 20, 15, 10])
    rows = np.repeat(np.arange(100), 6 * lengths)
    cols = np.concatenate(
        [np.sort(rng.choice(20, n, False)) + 20 * p for n in lengths for p in range(6)]
    )
    converted = Hyb(6, 4).convert(pattern_of(rows, cols, (100, 120)))
    sizes = [p.size for p in converted.parts]
    assert len(sizes) == 30 and all(sizes)
    figure = plot_format(converted)
    assert not figure.legends  # the names stand beside the bars
    bars = figure.axes[2]
    texts = [t.get_text() for t in bars.get_yticklabels()]
    assert len(texts) == 20
    assert texts[-1].startswith("11 smaller parts: ")
    counts = [int(t.split(": ")[-1].split(" ")[0].replace(",", "")) for t in texts]
    assert sum(counts) == len(rows)
    assert sum(b.get_width() for b in bars.patches) == converted.places


def test_nothing_stored():
    for name in ("nothing stored", "no rows", "no columns"):
        figure = plot_format(CSR().convert(MATRICES[name]))
        assert legend(figure) == ["nothing stored"]
        assert not figure.axes[0].collections
    figure = plot_format(Hyb(1, 2).convert(pattern_of([], [], (1000, 900))))
    assert (figure.axes[0].images[0].get_array() == 1).all()
    assert "0 elements" in plot_pattern(pattern_of([], [], (0, 900))).axes[0].get_title()


def test_image_shows_padding_lighter():
    converted = BSR(64, 64).convert(pattern_of([0], [0], (300, 400)))
    (shown,) = plot_format(converted).axes[0].images
    image = np.asarray(shown.get_array())
    assert image.shape == (150, 200, 3)  # pixels of 2 x 2
    assert shown.get_extent() == [-0.5, 399.5, 299.5, -0.5]
    want = np.ones((150, 200, 3))
    want[:32, :32] = tint(BLUE)
    want[0, 0] = BLUE
    np.testing.assert_allclose(image, want)


def test_density():
    rows, cols = np.nonzero(np.ones((4, 4)))
    pattern = pattern_of([*rows, 513], [*cols, 513], (514, 514))
    figure = plot_pattern(pattern)
    axis, part, bar = figure.axes
    shares = axis.images[0].get_array()
    assert shares.shape == (172, 172)  # pixels of 3 x 3, the last ones of one row and column
    expected = np.zeros((172, 172))
    expected[:2, :2] = [[1, 1 / 3], [1 / 3, 1 / 9]]
    expected[171, 171] = 1
    np.testing.assert_allclose(shares.filled(0), expected)
    assert bar.get_ylabel() == "share stored of 3 x 3 coordinates"


def test_part_of_a_large_matrix():
    """The first of the windows that store most, in the colours of the parts, and where it lies."""
    rows, cols = np.concatenate([[60, 61, 61, 199], [0, 150]]), np.array([100, 101, 102, 0, 5, 5])
    cells = sorted({(int(r), int(c)) for r, c in zip(rows, cols)})
    pattern = pattern_of(*np.array(cells).T, (200, 300))
    window = Window.of(*pattern.coords, pattern.shape)
    assert window == ((48, 96), (96, 144))
    inside = [(100, 60), (101, 61), (102, 61)]
    assert drawn(plot_pattern(pattern).axes[1]) == {key(BLUE): inside}
    whole, part, _ = plot_format(Hyb(1, 1).convert(pattern), name="here").axes
    assert whole.get_title() == "here as hyb_1_1, 200 x 300"
    assert drawn(part) == {key(BLUE): inside[:1], key(ORANGE): inside[1:]}
    assert part.get_title() == "rows from 48, columns from 96"
    (frame,) = whole.patches
    assert frame.get_bbox().extents.tolist() == [95.5, 47.5, 143.5, 95.5]
    # At the end of a matrix a window begins earlier.
    assert Window.of(np.array([199]), np.array([299]), (200, 300)) == ((152, 200), (252, 300))


def test_patterns_from_elsewhere():
    mask = MATRICES["random"]
    matrix = scipy.sparse.coo_array((np.ones(mask.nnz), tuple(mask.coords)), mask.shape)
    want = drawn(plot_pattern(mask).axes[0])
    assert want == {key(BLUE): sorted(zip(*(c.tolist() for c in mask.coords[::-1])))}
    assert drawn(plot_pattern(matrix.tocsc()).axes[0]) == want
    assert drawn(plot_pattern(SparseMatrix(matrix)).axes[0]) == want
    twice = scipy.sparse.coo_array((np.ones(2), ([1, 1], [2, 2])), (3, 4))
    assert plot_pattern(twice).axes[0].get_title() == "3 x 4: 1 element"
    assert plot_pattern(twice, name="two").axes[0].get_title() == "two, 3 x 4: 1 element"
    assert twice.nnz == 2


@pytest.mark.parametrize("name", ["random", "one dense row"])
def test_given_axes_are_drawn_on(name):
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert plot_pattern(MATRICES[name], left) is left
    assert plot_format(BSR(4, 4).convert(MATRICES[name]), ax=right) is right
    assert right.get_legend() is not None and figure.axes[:2] == [left, right]
    for ax in (left, right):
        assert ax.yaxis_inverted() and (ax.collections or ax.images)


@pytest.mark.parametrize("fmt", [BSR(4, 4), Hyb(2, 7)], ids=lambda f: f.name)
@pytest.mark.parametrize("name", by_turns(["random", "one dense row", "one column"], 3))
def test_legend_overlaps_nothing(fmt, name):
    figure = plot_format(fmt.convert(MATRICES[name]))
    figure.draw_without_rendering()
    boxes = [ax.get_tightbbox() for ax in figure.axes]
    boxes += [legend.get_window_extent() for legend in figure.legends]
    assert len(boxes) == 3
    assert not any(box.overlaps(other) for n, box in enumerate(boxes) for other in boxes[:n])
    edge = figure.bbox.padded(1)
    for box in boxes:
        assert edge.x0 <= box.x0 and box.x1 <= edge.x1 and edge.y0 <= box.y0 and box.y1 <= edge.y1


def test_other_orders_are_refused():
    tensor = TENSORS["random"]
    expected = r": expected 2 axes, got shape \(5, 6, 7\)"
    with pytest.raises(ValueError, match="plot_pattern: argument 'pattern'" + expected):
        plot_pattern(tensor)
    with pytest.raises(ValueError, match="plot_format: argument 'converted'" + expected):
        plot_format(CSF((0, 1, 2)).convert(tensor))
    with pytest.raises(TypeError, match="plot_pattern: .*expected a Pattern.*, got ndarray"):
        plot_pattern(np.eye(3))
    with pytest.raises(TypeError, match="plot_format: .*expected a pattern in a form.*, got Spars"):
        plot_format(SparseMatrix(np.eye(3, dtype=int)[:2]))


def test_missing_matplotlib(monkeypatch):
    pattern = MATRICES["random"]
    converted = CSR().convert(pattern)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for function, argument in ((plot_pattern, pattern), (plot_format, converted)):
        with pytest.raises(ImportError) as error:
            function(argument)
        assert str(error.value) == (
            f"{function.__name__}: needs matplotlib, which is not installed: "
            f"run `{install_hint('plot', 'matplotlib')}`"
        )


@pytest.mark.slow  # a separate process
def test_matplotlib_is_imported_late_and_without_pyplot():
    code = (
        f"import sys, numpy; {WITHOUT_TORCH}; import sparsetir.plotting.patterns as plot\n"
        "from sparsetir.formats import BSR, Pattern\n"
        "assert 'matplotlib' not in sys.modules\n"
        "pattern = Pattern([numpy.arange(3), numpy.arange(3)], (3, 3))\n"
        "plot.plot_format(BSR(2, 2).convert(pattern))\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("size", [20, 2000])
def test_names_that_are_formulas_or_code(size):
    """Titles hold them as they are; what is no XML is written out."""
    matrix = SparseMatrix(scipy.sparse.random_array((size, size), density=0.01, rng=0))
    figure = plot_pattern(matrix.pattern, name="<script>a()</script> $\\frac{ & \x1b[31m\n")
    text = io.BytesIO()
    figure.savefig(text, format="svg")
    svg = text.getvalue().decode()
    parseString(svg)
    assert "<script" not in svg and "\x1b" not in svg
    assert "$\\frac{ & \\x1b[31m\\n" in figure.axes[0].get_title()
