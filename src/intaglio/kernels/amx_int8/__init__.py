"""Kernels for processors with AMX-INT8."""
