"""A tiny decoder-only transformer, and its optimizer. Every process makes the same one from the same seed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from zephon_daemon.demo.corpus import VOCABULARY

SEQUENCE = 256
WIDTH, LAYERS, HEADS = 128, 2, 4
RATE, TOKEN_RATE = 1e-3, 1e-2
"""Of the layers, and of what turns tokens into vectors and back: those see each token rarely, and learn faster."""
WARMUP = 8
"""Steps until the rates are reached."""


class Layer(nn.Module):  # type: ignore[misc]  # torch is not there where types are checked
    """Causal attention and a feed-forward network, each with its norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_feed = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries_keys_values, self.attended = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        split = self.queries_keys_values(self.before_attention(hidden)).view(rows, length, 3, HEADS, WIDTH // HEADS)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.attended(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        out: Tensor = hidden + self.feed(self.before_feed(hidden))
        return out


class TinyModel(nn.Module):  # type: ignore[misc]
    """About 1.5 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.predict = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.3)
        nn.init.normal_(self.places.weight, std=0.02)
        nn.init.zeros_(self.predict.weight)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The loss, summed over the labels that are not -100. Both int64 `[rows, length]`."""
        hidden = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        scores = self.predict(self.norm(self.layers(hidden)))
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")


def make_model(seed: int) -> tuple[TinyModel, torch.optim.Optimizer]:
    """The model as it is before the first step, and its optimizer."""
    torch.manual_seed(seed)
    model = TinyModel()
    of_tokens = [model.tokens.weight, model.predict.weight]
    others = [parameter for parameter in model.parameters() if all(parameter is not each for each in of_tokens)]
    groups = [{"params": of_tokens, "full_rate": TOKEN_RATE}, {"params": others, "full_rate": RATE}]
    return model, torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)


def set_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    """The learning rates of a step, counted from 1: rising at first, then constant."""
    for group in optimizer.param_groups:
        group["lr"] = group["full_rate"] * min(1.0, step / WARMUP)
