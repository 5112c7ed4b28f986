"""Device code: CUDA, C++ for CPUs, one plain reference; it knows tensors, not requests."""
