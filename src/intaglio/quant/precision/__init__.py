"""Decisions about precision: values that stay in float, by the recipe or the data, and layers that are split."""
