"""Generators of kernels for AVX512-VNNI."""
