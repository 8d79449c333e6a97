"""Decomposition of operators without a record into operators that have one."""
