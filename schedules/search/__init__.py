"""The choice of a config for a problem, and of those worth measuring."""
