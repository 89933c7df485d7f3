"""Mamba-2: its kernels in Triton, and those in CUDA C++."""
