"""Copies of float models that are captured, and what of the model's state they share or restore."""
