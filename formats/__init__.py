"""Format descriptions and rewrite rules."""
