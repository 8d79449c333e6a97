"""Helpers for torch.fx graphs, and the passes that rewrite a captured graph."""
