"""Operators whose kernels take tensors as the model has them.

No recipe quantizes them. They are floats, integers or booleans inside of the program, so that a model is not
interrupted for them.
"""
