"""Kernel generators for AVX512-VNNI."""
