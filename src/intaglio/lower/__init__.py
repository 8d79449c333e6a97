"""Reference -> integer graph -> partitions, layout, plan: the border between torch.fx and the integer world."""

from intaglio.lower.fuse import fuse
from intaglio.lower.integer import requantize
from intaglio.lower.layout import lay_out
from intaglio.lower.lowered import Island, Lowered
from intaglio.lower.place import plan
from intaglio.lower.requantizer import Requantizer

__all__ = ["Island", "Lowered", "Requantizer", "fuse", "lay_out", "plan", "requantize"]
