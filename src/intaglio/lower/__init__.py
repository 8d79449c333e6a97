"""Reference -> integer graph: the border between torch.fx and the integer world."""

from intaglio.lower.lowered import Island, Lowered
from intaglio.lower.lowering import requantize
from intaglio.lower.requantizer import Requantizer

__all__ = ["Island", "Lowered", "Requantizer", "requantize"]
