"""Format descriptions, rewrite rules, decomposition and index inference."""
