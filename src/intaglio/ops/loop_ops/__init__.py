"""The loop operator, the float operators its bodies are made of, and the ATen operators that become such bodies."""
