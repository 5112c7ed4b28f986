"""Device code: CUDA source, CPU versions and one plain reference. It knows tensors, not requests."""
