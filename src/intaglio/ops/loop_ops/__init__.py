"""The loop operator, the primitives of its body, and ATen operators that are decomposed into such bodies."""
