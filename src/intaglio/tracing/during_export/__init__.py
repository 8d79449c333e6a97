"""Changes of a model and of torch that last while torch.export runs."""
