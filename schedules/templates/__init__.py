"""Templates: how kernels of operators are made of configs."""
