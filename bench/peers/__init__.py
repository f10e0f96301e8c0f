"""Measurements in separate processes: the clocks of the tuner and the bench."""
