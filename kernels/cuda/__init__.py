"""CUDA C++ kernels and their launchers; one source for NVRTC and for the emulation on the CPU."""
