"""Draws the pictures of the pages: `python docs/draw_pictures.py` writes docs/pictures/*.png.

The files are in the repository, so that pages show them anywhere. `docs/speed.py` draws
the measurements.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from PIL import Image

from sparsetir import SparseMatrix
from sparsetir.data.datasets import load_cora
from sparsetir.formats import BSR, CSR, DIA, Format, Hyb, Mixture, by_band
from sparsetir.formats.format import REGISTRY

FOLDER = Path(__file__).parent / "pictures"
# By the name of the file that a format is in.
GALLERY: dict[str, Format] = {
    entry.kind.__module__.rpartition(".")[2]: entry.small
    for entry in REGISTRY.values()
    if entry.small is not None
}
GALLERY["mixture"] = Mixture("band_and_csr", (DIA(), CSR()), by_band(-1, 1))


def example() -> Any:
    """24 x 24: three diagonals, two dense blocks, a long row and short ones, two empty rows."""
    rng = np.random.default_rng(4)
    dense = sum(np.eye(24, k=k) for k in (-1, 0, 1)) * (np.arange(24) < 12)[:, None]
    dense[12:16, 16:20] = dense[16:20, 4:8] = 1
    dense[20, ::2] = dense[21, 9] = dense[23, [3, 17]] = 1
    dense[rng.integers(0, 12, 10), rng.integers(12, 24, 10)] = 1
    dense[3] = dense[22] = 0
    return sp.csr_array(dense.astype("float32"))


def save(figure: Any, name: str) -> None:
    """Save as a small PNG file, of 64 colours, on white."""
    file = BytesIO()
    figure.savefig(file, dpi=110, facecolor="white")
    Image.open(file).convert("RGB").quantize(64).save(FOLDER / f"{name}.png", optimize=True)
    print(f"drawn: {name}.png")


def main() -> None:
    """Draw all."""
    FOLDER.mkdir(exist_ok=True)
    matrix = SparseMatrix(example())
    for name, fmt in GALLERY.items():
        save(matrix.plot(fmt), name)
    cora = SparseMatrix(load_cora())
    save(cora.plot(name="Cora"), "cora")
    save(cora.plot(Hyb(1, 2), name="Cora"), "cora_hyb")
    save(cora.plot(BSR(16, 16), name="Cora"), "cora_bsr")
    try:
        import torch

        from sparsetir.nn import kernel_map
        from sparsetir.plotting.kernel_map import plot_kernel_map
    except ImportError:
        print("not drawn, for torch is missing: kernel_map.png")
        return
    torch.manual_seed(0)
    cells = torch.unique(torch.randint(0, 12, (2000, 3)), dim=0)
    coords = torch.nn.functional.pad(cells, (1, 0))
    save(plot_kernel_map(kernel_map(coords, 3), name="a cloud of 1,188 points"), "kernel_map")


if __name__ == "__main__":
    main()
