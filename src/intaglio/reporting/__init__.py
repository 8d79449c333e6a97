"""Reports of quantized models: what they cost in accuracy and time, operator by operator."""
