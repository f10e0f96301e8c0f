"""Which config a problem gets, and which are worth a search."""
