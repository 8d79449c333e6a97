"""Generators of kernels for plain C++."""
