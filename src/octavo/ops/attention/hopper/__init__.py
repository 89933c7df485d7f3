"""Kernels in Gluon for Hopper that the copy engine feeds. What they serve say `decode.py` and `prefill.py` above."""
