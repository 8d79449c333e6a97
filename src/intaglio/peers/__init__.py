"""Other quantization tools and inference engines, set up by their defaults, for comparison with intaglio."""
