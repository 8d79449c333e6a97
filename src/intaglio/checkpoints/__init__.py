"""Checkpoints of models that other tools quantized: formats, and what is read from them."""

from intaglio.checkpoints.checkpoint import Checkpoint
from intaglio.checkpoints.read_checkpoint import read_checkpoint

__all__ = ["Checkpoint", "read_checkpoint"]
