"""Cases that `same_bits.py` records: networks, the doors they go through, and the kernels of their programs."""
