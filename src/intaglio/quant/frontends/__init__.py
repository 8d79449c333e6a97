"""Accept quantizers and quantized models of other tools."""
