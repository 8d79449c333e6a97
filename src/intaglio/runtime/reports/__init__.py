"""Reports about a compiled model: coverage, profiles, and clipped values."""
