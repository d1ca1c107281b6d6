"""The Triton kernels, one file per operation; imported only where they run (core/kernels/backend.py decides)."""
