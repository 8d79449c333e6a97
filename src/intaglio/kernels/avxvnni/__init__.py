"""Kernel generators for AVX-VNNI."""
