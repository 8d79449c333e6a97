"""Programs with keys and values of a cache as inputs, which grow by results."""

from dataclasses import replace

from support.integer_graphs import H, N, Net, W

GROWN = (3, 4)
"""Positions of the inputs that grow; the results behind the first belong to them."""


def cached_attention(net: Net, heads: int = 2) -> tuple[str, ...]:
    """Attention of W new tokens to H earlier ones and themselves; four heads of queries share ``heads`` of keys."""
    q = net.quantize(net.input(N, 4, W, 8))
    new = [net.centred(net.quantize(net.input(N, heads, W, 8), zero_point=128)) for _ in range(2)]
    every = [net.join([earlier(net, value), value], axis=2) for value in new]
    permuted = net.same("permute", net.attention(q, *every), order=(0, 2, 1, 3))
    result = net.linear(net.same("reshape", permuted, shape=(N, W, 32)), 7, f32=True)
    return result, *(net.same("reshape", value, shape=(N, heads, W, 8), relayout=True) for value in new)


def one_head(net: Net) -> tuple[str, ...]:
    """All heads of queries share one of keys."""
    return cached_attention(net, 1)


def earlier(net: Net, new: str) -> str:
    """Values of a tensor of the caller with the parameters of new values."""
    heads = net.types[new].shape[1]
    held = net.input_levels(N, heads, H, 8)
    net.types[held] = replace(net.types[held], q=net.types[new].q)
    net.value[held] = net.value[held].clip(1)
    return net.same("reshape", held, shape=(N, heads, H, 8), relayout=True)
