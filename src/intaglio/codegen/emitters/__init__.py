"""Functions that print the steps of a program, a module for each family of kernels."""
