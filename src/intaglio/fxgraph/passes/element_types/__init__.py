"""Passes that change the element types of values: wider integers and floats, pairs for complex numbers."""
