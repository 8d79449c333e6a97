"""Fusion: which operators run as one kernel. One table of rows, one pattern language, one matcher, no torch."""
