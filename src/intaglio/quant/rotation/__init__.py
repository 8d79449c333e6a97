"""Rotation of the residual stream and of the values of attention before calibration, folded into weights."""
