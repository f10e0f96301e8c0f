"""Measuring in processes of their own: what the tuner and the bench time calls with."""
