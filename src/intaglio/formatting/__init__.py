"""Text of numbers, and HTML of small tables, for printed results and notebooks."""
