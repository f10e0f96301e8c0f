"""The choice of a config for a problem, and of those that are worth a search."""
