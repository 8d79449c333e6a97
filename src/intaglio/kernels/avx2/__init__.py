"""Kernel generators for AVX2."""
