"""Graphs of torch.fx: reading nodes, and the passes that rewrite a captured graph."""
