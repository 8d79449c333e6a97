"""Recommenders, tables, time series, graph networks and recurrent networks, with random weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from zoo_models.entry import Entry, random_transformer


class DLRM(nn.Module):
    """Dense features and bags of categories, with their pairwise products, as Facebook's recommender."""

    def __init__(self, dense: int = 13, bags: int = 6, rows: int = 1000, width: int = 16) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(dense, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(bags))
        pairs = (bags + 1) * bags // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 64), nn.ReLU(), nn.Linear(64, 1), nn.Sigmoid())

    def forward(self, dense: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        parts = torch.stack([x, *[table(categories[:, i]) for i, table in enumerate(self.tables)]], 1)
        products = torch.bmm(parts, parts.transpose(1, 2))
        rows, columns = torch.tril_indices(parts.shape[1], parts.shape[1], -1)
        return self.top(torch.cat([x, products[:, rows, columns]], 1))


class WideAndDeep(nn.Module):
    """A linear model of categories beside a network of their embeddings."""

    def __init__(self, fields: int = 8, rows: int = 500, width: int = 16) -> None:
        super().__init__()
        self.wide, self.table = nn.Embedding(rows, 1), nn.Embedding(rows, width)
        self.deep = nn.Sequential(
            nn.Linear(fields * width, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Linear(64, 1),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.wide(ids).sum(1) + self.deep(self.table(ids).flatten(1)))


class TwoTower(nn.Module):
    """Normalized vectors of users and items, and their similarity."""

    def __init__(self, rows: int = 500, width: int = 32) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(rows, width), nn.Embedding(rows, width)
        self.user = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 32))
        self.item = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        a = nn.functional.normalize(self.user(self.users(user)), dim=-1)
        b = nn.functional.normalize(self.item(self.items(item)), dim=-1)
        return (a * b).sum(-1)


class NBeats(nn.Module):
    """N-BEATS with generic blocks: each explains a part of the series and forecasts with it."""

    def __init__(self, past: int = 48, future: int = 12, blocks: int = 4, width: int = 64) -> None:
        super().__init__()
        self.past = past
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(past, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, past + future)
            )
            for _ in range(blocks)
        )

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        forecast = torch.zeros(())
        for block in self.blocks:
            theta = block(series)
            series, forecast = series - theta[:, : self.past], forecast + theta[:, self.past :]
        return forecast


class DLinear(nn.Module):
    """DLinear: a linear layer each for the trend and the rest of a series."""

    def __init__(self, past: int = 96, future: int = 24) -> None:
        super().__init__()
        self.average = nn.AvgPool1d(25, 1, 12, count_include_pad=False)
        self.trend, self.rest = nn.Linear(past, future), nn.Linear(past, future)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        series = series.transpose(1, 2)
        trend = self.average(series)
        return (self.trend(trend) + self.rest(series - trend)).transpose(1, 2)


class TemporalConvolutions(nn.Module):
    """A temporal convolutional network with dilated causal convolutions and residual sums."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, channels, 1)
        self.layers = nn.ModuleList(nn.Conv1d(channels, channels, 3, padding=2 * d, dilation=d) for d in (1, 2, 4))
        self.head = nn.Linear(channels, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.relu(layer(x)[..., : x.shape[-1]])
        return self.head(x.mean(-1))


class TabTransformer(nn.Module):
    """Attention among embedded categories, beside normalized numbers."""

    def __init__(self, fields: int = 6, numbers: int = 8, rows: int = 100, width: int = 32) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(rows, width), nn.LayerNorm(numbers)
        layer = nn.TransformerEncoderLayer(width, 4, 64, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(fields * width + numbers, 64), nn.SELU(), nn.Linear(64, 2))

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.encoder(self.table(ids)).flatten(1), self.norm(numbers)], 1))


class Tagger(nn.Module):
    """A bidirectional recurrent network with a label for each word."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 32)
        self.layers = kind(32, 48, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(96, 9)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.table(ids))[0])


class PackedTagger(Tagger):
    """The same for packed sequences."""

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        pack, pad = nn.utils.rnn.pack_padded_sequence, nn.utils.rnn.pad_packed_sequence
        packed = pack(self.table(ids), lengths, batch_first=True, enforce_sorted=False)
        return self.head(pad(self.layers(packed)[0], batch_first=True)[0])


def mlp() -> Entry:
    """Return a network for tables."""
    layers: list[nn.Module] = []
    for width in (64, 64):
        layers += [nn.LazyLinear(width), nn.BatchNorm1d(width), nn.SiLU(), nn.Dropout(0.1)]
    net = nn.Sequential(*layers, nn.LazyLinear(2))
    net(torch.randn(4, 20))
    return Entry(net.eval(), lambda count: (torch.randn(count, 20),))


def patch_tst() -> Entry:
    """Return PatchTST of transformers."""
    model = random_transformer(
        "PatchTSTForPrediction",
        num_input_channels=3,
        context_length=64,
        patch_length=8,
        patch_stride=8,
        prediction_length=16,
        d_model=32,
        num_attention_heads=4,
        num_hidden_layers=2,
        ffn_dim=64,
    )
    return Entry(model, lambda count: {"past_values": torch.randn(count, 64, 3)}, {}, "transformer")


def graph_network(kind: str) -> Entry:
    """Return a network of torch_geometric by its class: features of nodes and pairs of neighbours in."""
    from torch_geometric.nn import models

    model = getattr(models, kind)(16, 32, 2, 4).eval()
    return Entry(model, lambda count: (torch.randn(25 * count, 16), torch.randint(0, 25 * count, (2, 80 * count))))


def drawn(make: Any, batch: Any, **options: Any) -> Entry:
    """Return an entry of a model that is constructed after the seed is set."""
    torch.manual_seed(0)
    return Entry(make().eval(), batch, **options)


MODELS = {
    "dlrm": partial(drawn, DLRM, lambda n: (torch.randn(n, 13), torch.randint(0, 1000, (n, 6, 4)))),
    "wide_and_deep": partial(drawn, WideAndDeep, lambda n: (torch.randint(0, 500, (n, 8)),)),
    "two_tower": partial(drawn, TwoTower, lambda n: (torch.randint(0, 500, (n,)), torch.randint(0, 500, (n,)))),
    "n_beats": partial(drawn, NBeats, lambda n: (torch.randn(n, 48),)),
    "dlinear": partial(drawn, DLinear, lambda n: (torch.randn(n, 96, 4),)),
    "temporal_convolutions": partial(drawn, TemporalConvolutions, lambda n: (torch.randn(n, 4, 64),)),
    "tab_transformer": partial(drawn, TabTransformer, lambda n: (torch.randint(0, 100, (n, 6)), torch.randn(n, 8))),
    "lstm_tagger": partial(
        drawn, partial(Tagger, nn.LSTM), lambda n: (torch.randint(0, 500, (n, 20)),), most_used=True
    ),
    "gru_tagger": partial(drawn, partial(Tagger, nn.GRU), lambda n: (torch.randint(0, 500, (n, 20)),)),
    "packed_lstm": partial(
        drawn,
        partial(PackedTagger, nn.LSTM),
        lambda n: (torch.randint(0, 500, (n, 20)), torch.tensor([20 - i % 4 for i in range(n)])),
    ),
    "mlp": mlp,
    "patch_tst": patch_tst,
    "gcn": partial(graph_network, "GCN"),
    "gat": partial(graph_network, "GAT"),
    "graph_sage": partial(graph_network, "GraphSAGE"),
    "gin": partial(graph_network, "GIN"),
}
