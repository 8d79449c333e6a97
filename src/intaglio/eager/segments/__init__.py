"""Segments (straight-line sequences of recorded operators) and the deferred tensors computed by them."""
