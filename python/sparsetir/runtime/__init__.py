"""The runtime: arrays, kernels, the pipeline that builds them, threads, kernel files."""
