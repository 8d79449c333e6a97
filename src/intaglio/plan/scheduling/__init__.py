"""Decisions that depend on the machine: schedules, guards, batch tiling, and what they cost."""
