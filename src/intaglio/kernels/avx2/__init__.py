"""Generators of kernels for AVX2."""
