"""Record the operators that a model runs, and build a graph from a recording."""
