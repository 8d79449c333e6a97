"""Many independent calls of a model: several at the same time, each with its own threads."""

from intaglio.serving.call_pool import Pool, PoolSpeed

__all__ = ["Pool", "PoolSpeed"]
