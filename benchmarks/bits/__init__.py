"""What `same_bits.py` records: the networks, the doors they go through, and the kernels of their programs."""
