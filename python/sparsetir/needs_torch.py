"""Imported first by modules for torch: says what to install where there is none."""

from sparsetir.extras import need

need("sparsetir.ops, sparsetir.nn, sparsetir.masks", "torch", "torch", title="PyTorch")
