"""Sparse tensor expressions in one line: the notation, and programs, kernels and plans of it."""
