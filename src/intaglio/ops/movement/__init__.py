"""Data movement operators, which rearrange elements without changing them."""
