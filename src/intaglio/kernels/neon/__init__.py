"""Kernel generators for AArch64."""
