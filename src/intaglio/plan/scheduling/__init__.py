"""Machine-dependent decisions: kernels, schedules, guards, batch tiling, and the costs of steps."""
