"""Lower a reference model (torch.fx graph with Q/DQ nodes) to an integer graph and float islands."""

from intaglio.lower.lowered import Island, Lowered
from intaglio.lower.lowering import requantize
from intaglio.lower.requantizer import Requantizer

__all__ = ["Island", "Lowered", "Requantizer", "requantize"]
