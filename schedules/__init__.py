"""Operators, one per file: the program, its oracle, its schedule templates."""
