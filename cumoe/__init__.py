"""FP8 Mixture-of-Experts kernels, compiled at run time."""
