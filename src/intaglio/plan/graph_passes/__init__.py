"""Passes over the integer graph that `lower` runs last: they prepare it for planning."""
