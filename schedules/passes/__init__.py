"""Rewrites of stage II and stage III."""
