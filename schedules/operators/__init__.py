"""Operators: their problems, operands and exact results."""
