"""Recording of the operators a model runs, and the graph made of a recording."""
