"""Sparse tensor expressions in one line: their notation, programs, kernels and plans."""
