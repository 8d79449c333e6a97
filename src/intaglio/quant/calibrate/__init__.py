"""Observe values over data and merge what was counted."""
