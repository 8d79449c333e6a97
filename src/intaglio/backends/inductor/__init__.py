"""The TorchInductor backend: legalization of a reference, the compiled model, and a report about every operator."""
