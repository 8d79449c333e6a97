"""Times of a quantized model beside those of its float model."""
