"""Calibration callbacks of patterns, and the values and parameters that they read and return."""
