"""CUDA C++ kernel source run on the CPU, for tests without a GPU."""
