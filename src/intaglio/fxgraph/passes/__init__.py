"""Passes that rewrite a torch.fx graph in place; each returns the number of rewrites."""
