"""Passes that prepare the integer graph for planning; `lower` runs them last."""
