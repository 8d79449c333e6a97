"""Copies of float models that are captured, and the parameters that they share with the model."""
