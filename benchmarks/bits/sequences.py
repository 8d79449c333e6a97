"""Small networks of sequences: transformers, recurrent layers, tables of embeddings, state."""

from __future__ import annotations

import torch
from networks import declare_operators
from torch import Tensor, nn
from torch.nn import functional as F


class Bert(nn.Module):
    """BERT of two layers from transformers; ids and mask by position, the last hidden state."""

    def __init__(self) -> None:
        super().__init__()
        declare_operators()
        from transformers import BertConfig, BertModel

        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        config = BertConfig(vocab_size=200, max_position_embeddings=64, attn_implementation="sdpa", **sizes)
        self.model = BertModel(config)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask).last_hidden_state


class Vit(nn.Module):
    """A vision transformer of one layer from transformers; the logits."""

    def __init__(self) -> None:
        super().__init__()
        declare_operators()
        from transformers import ViTConfig, ViTForImageClassification

        sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
        config = ViTConfig(image_size=32, patch_size=8, num_labels=5, attn_implementation="sdpa", **sizes)
        self.model = ViTForImageClassification(config)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model(pixel_values=pixels).logits


class Decoder(nn.Module):
    """A block as large language models have it: RMS norm, rotary positions, grouped queries, SwiGLU, causal."""

    def __init__(self, width: int = 64, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.words = nn.Embedding(100, width)
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * groups * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = nn.Linear(width, 96), nn.Linear(width, 96), nn.Linear(96, width)
        self.first, self.last, self.head = nn.RMSNorm(width), nn.RMSNorm(width), nn.Linear(width, 100)
        angles = torch.arange(64)[:, None] * 100 ** (-torch.arange(self.size // 2) / (self.size // 2))
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def rotated(self, x: Tensor) -> Tensor:
        length, half = x.size(2), self.size // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.cos[:length] + turned * self.sin[:length]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        n, length, width = x.shape
        y = self.first(x)
        q = self.q(y).view(n, length, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(y).view(n, length, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        q, k = self.rotated(q), self.rotated(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(n, length, width))
        y = self.last(x)
        return self.head(x + self.down(F.silu(self.gate(y)) * self.up(y)))


class WrittenOut(nn.Module):
    """Attention written out, in a block whose norm stands behind the sum."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (part.view(n, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, 2))
        weights = torch.softmax(q @ k.transpose(2, 3) / (width // self.heads) ** 0.5, -1)
        x = self.first(x + self.out((weights @ v).transpose(1, 2).reshape(n, length, width)))
        return self.last(x + self.narrow(F.gelu(self.wide(x))))


class EncoderLayer(nn.Module):
    """PyTorch's own layer, with places that are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.layer(x, src_key_padding_mask=padding)


class Products(nn.Module):
    """Products of two activations, one of them an einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(24, 32), nn.Linear(24, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.a(x), self.b(y)
        scores = torch.bmm(a, b.transpose(1, 2))
        return self.c(torch.einsum("nij,njk->nik", scores, b))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 24)
        self.layer = nn.LSTM(24, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.words(ids))[0])


class Gru(nn.Module):
    """Both directions, with a state that is given and one that is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(16, 24, bidirectional=True, batch_first=True)
        self.head = nn.Linear(48, 6)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, state = self.layer(x, state)
        return self.head(y), state


class Tagger(nn.Module):
    """A cell in a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.tags = nn.Embedding(100, 32), nn.GRUCell(32, 48), nn.Linear(48, 7)

    def forward(self, ids: Tensor) -> Tensor:
        state, found = torch.zeros(ids.size(0), 48), []
        for word in self.words(ids).unbind(1):
            state = self.cell(word, state)
            found.append(self.tags(state))
        return torch.stack(found, 1)


class Recommender(nn.Module):
    """Bags of embeddings beside dense features, their products, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(60, 16, mode="sum") for _ in range(3))
        self.word, self.dense = nn.Embedding(40, 16), nn.Linear(13, 16)
        self.top = nn.Sequential(nn.Linear(16 + 25, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())

    def forward(self, dense: Tensor, ids: Tensor, word: Tensor) -> Tensor:
        x = torch.relu(self.dense(dense))
        rows = [x, self.word(word), *[bag(ids[:, i]) for i, bag in enumerate(self.bags)]]
        stacked = torch.stack(rows, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, products], 1))


class Cache(nn.Module):
    """One head whose keys and values stay in buffers, written at the positions of a call."""

    def __init__(self, cells: int = 8, width: int = 16) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.register_buffer("keys", torch.zeros(1, cells, width))
        self.register_buffer("values", torch.zeros(1, cells, width))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.keys[:, at] = self.k(x)
        self.values[:, at] = self.v(x)
        weights = torch.softmax(self.q(x) @ self.keys.transpose(1, 2) / 4, -1)
        return self.o(weights @ self.values)


class Loop(nn.Module):
    """A loop that runs as long as the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        from torch._higher_order_ops import while_loop

        start = (torch.zeros((), dtype=torch.int64), self.a(x))
        _, y = while_loop(lambda i, y: i < n, lambda i, y: (i + 1, torch.tanh(self.b(y) + y)), start)
        return self.c(y)
