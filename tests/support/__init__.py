"""Helpers of the tests; no test file imports another test file."""
