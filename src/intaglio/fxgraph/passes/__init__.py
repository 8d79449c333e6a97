"""Passes that rewrite a torch.fx graph in place; each returns how many rewrites it made."""
