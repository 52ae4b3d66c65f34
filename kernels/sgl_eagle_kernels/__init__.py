"""Triton kernels for drafting, each beside its plain torch reference."""
