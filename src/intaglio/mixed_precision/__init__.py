"""Mixed precision: the search for the precision of every group of operators under a target or limits."""
