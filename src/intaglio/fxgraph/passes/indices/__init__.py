"""Passes over operators at computed places: sorts, scatters, groups of rows, and rows that a condition selects."""
