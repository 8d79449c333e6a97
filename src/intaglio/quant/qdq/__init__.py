"""Turn ranges into quantization parameters, and a prepared graph into the Q/DQ reference model."""
