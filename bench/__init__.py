"""Measurements; `python -m bench --help`, and README.md in this folder."""
