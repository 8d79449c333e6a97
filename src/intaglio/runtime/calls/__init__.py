"""Calls of programs: plans of memory and threads by the sizes of a call, and the tensors that segments use."""
