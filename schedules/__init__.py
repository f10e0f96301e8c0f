"""One file per operator: its program, its oracle, its schedule templates."""
