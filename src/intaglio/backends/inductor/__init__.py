"""TorchInductor: a reference in the form its patterns match, the compiled model, and what became of each node."""
