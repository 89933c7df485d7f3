"""Which kernels run layers of Mamba-2 on a GPU: Triton's, or those in CUDA C++."""
