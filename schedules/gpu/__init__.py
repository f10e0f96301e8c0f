"""GPU templates, and the passes that only they use."""
