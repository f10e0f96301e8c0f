"""Studies of papers, as one command each: `python -m bench study load-balance` and others."""
