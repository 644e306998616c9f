"""The demo's model: a byte-level GPT."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ByteGPT", "ModelShape", "mean_loss"]

NUM_BYTES = 256


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a `ByteGPT`.

    Two wide layers learn faster per second on a few cores than four narrow ones of the same size:
    46 against 60 ms a micro batch of 256 bytes on two cores.
    """

    width: int = 352
    num_layers: int = 2
    num_heads: int = 4
    context: int = 64


class Block(nn.Module):
    """Attention to what came before, then a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps activations to activations, shape (sequences, bytes, width)."""
        x = x + self.out(self._attend(self.norm_attention(x)))
        x = x + self.down(F.gelu(self.up(self.norm_mlp(x))))
        return x

    def _attend(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], 3, self.num_heads, -1)
        q, k, v = self.qkv(x).view(split).permute(2, 0, 3, 1, 4)
        mixed: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class ByteGPT(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_BYTES, shape.width)
        self.position = nn.Parameter(torch.empty(shape.context, shape.width))
        blocks = (Block(shape.width, shape.num_heads) for _ in range(shape.num_layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, NUM_BYTES, bias=False)
        self._init_weights(shape.num_layers)

    def _init_weights(self, num_layers: int) -> None:
        """GPT-2's: 0.02 everywhere, less where a layer adds to the residual stream."""
        for name, p in self.named_parameters():
            if p.ndim < 2:
                continue
            adds_to_stream = name.endswith(("out.weight", "down.weight"))
            nn.init.normal_(p, std=0.02 / (2 * num_layers) ** 0.5 if adds_to_stream else 0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits, shape (sequences, bytes, 256), from bytes as int64, (sequences, bytes)."""
        x = self.embed(inputs) + self.position[: inputs.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy over all bytes of `targets`, in nats."""
        return mean_loss(self(inputs), targets)

    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(p.numel() for p in self.parameters())


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over all bytes of `targets`, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
