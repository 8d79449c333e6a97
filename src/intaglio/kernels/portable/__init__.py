"""Kernel generators for plain C++."""
