"""Schedules of loops: rows, passes along them, what is kept from pass to pass."""
