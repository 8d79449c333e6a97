"""Equalization of channels before calibration, by factors that are folded into weights."""
