"""Frontends for quantizers and quantized models of other tools."""
