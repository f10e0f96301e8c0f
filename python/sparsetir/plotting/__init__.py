"""Pictures of patterns and formats."""
