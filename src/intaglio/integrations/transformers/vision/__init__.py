"""Vision encoders that take images of any sizes in one sequence of patches."""
