"""Planning: checked requests for operators on patterns, and the plans that run them."""
