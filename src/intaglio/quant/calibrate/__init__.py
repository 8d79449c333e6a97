"""Calibration: observe values over data, and choose a range for each quantization point."""
