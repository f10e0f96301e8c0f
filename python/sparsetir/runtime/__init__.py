"""What runs: arrays, kernels, the pipeline that builds them, threads, files of kernels."""
