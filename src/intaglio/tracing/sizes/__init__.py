"""Free sizes of captured graphs: their names, ranges and conditions, and the shapes that the user requests."""
