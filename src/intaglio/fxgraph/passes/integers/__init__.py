"""Passes over integers: their types, sorts and counts."""
