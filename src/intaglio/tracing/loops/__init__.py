"""Loops with a number of turns: scans as unrolled graphs, and while loops as graphs of their own."""
