"""Segments, straight lines of recorded operators, and the deferred tensors that run along them."""
