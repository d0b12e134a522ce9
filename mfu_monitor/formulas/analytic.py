"""Closed forms for the FLOPs of a transformer: the second witness beside the count.

They say nothing about masks, frozen layers, recomputation, attention variants or what a step really ran; where they and
the count differ, the reason is worth knowing. One multiply-add is 2 FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from mfu_monitor.errors import ConfigurationError

__all__ = [
    "TRAINING_FLOPS_PER_PARAMETER",
    "AttentionShape",
    "Layers",
    "chinchilla_training_flops",
    "embedding_parameters",
    "logical_numel",
    "non_embedding_parameters",
    "palm_flops_per_token",
]

TRAINING_FLOPS_PER_PARAMETER = 6
"""Forward 2, gradient of the activations 2, gradient of the weights 2 (Kaplan et al., "Scaling Laws for Neural Language
Models", https://arxiv.org/abs/2001.08361, section 2.1)."""
PALM_ATTENTION_FACTOR = 12
"""Q K^T and A V are 2*T*H*Q FLOPs each for a token and layer; 4 forward, 8 backward (PaLM, appendix B)."""


def chinchilla_training_flops(parameters: int, tokens: int) -> int:
    """6ND: training FLOPs by parameters and tokens alone, attention left out.

    Args:
        parameters: N. Kaplan et al. leave the embeddings out (``non_embedding_parameters``); Hoffmann et al. ("Training
            Compute-Optimal Large Language Models", https://arxiv.org/abs/2203.15556, appendix F) find the difference
            small for large models.
        tokens: D.

    Example:
        >>> chinchilla_training_flops(70 * 10**9, 15 * 10**12)  # 6.3e24
        6300000000000000000000000
    """
    return TRAINING_FLOPS_PER_PARAMETER * parameters * tokens


def palm_flops_per_token(parameters: int, *, layers: int, heads: int, head_width: int, sequence_length: int) -> int:
    """PaLM's 6N + 12 L H Q T: training FLOPs of one token, attention as its full square.

    Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", https://arxiv.org/abs/2204.02311, appendix B.

    Args:
        parameters: N, all that take part in products.
        layers: L.
        heads: H, query heads.
        head_width: Q.
        sequence_length: T, tokens that a token may attend to.

    Example:
        PaLM 540B: N = 540.35e9, L = 118, H = 48, Q = 256, T = 2048.
    """
    return TRAINING_FLOPS_PER_PARAMETER * parameters + PALM_ATTENTION_FACTOR * (
        layers * heads * head_width * sequence_length
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Layers in which a query attends to the same number of keys."""

    count: int
    keys: int | None = None
    """Width of a sliding window, or of a chunk; None: the whole sequence."""
    is_chunked: bool = False
    """A query attends within its own chunk; else to the last ``keys`` keys."""

    def mean_keys(self, sequence_length: int) -> float:
        """Keys that a query of a causal sequence attends to, on average.

        A window W <= S has W S - W (W - 1) / 2 pairs, a whole sequence S (S + 1) / 2, and each chunk is a sequence.
        """
        length = sequence_length
        if self.keys is None or self.keys >= length:
            return (length + 1) / 2
        if not self.is_chunked:
            return self.keys - self.keys * (self.keys - 1) / (2 * length)
        chunks, rest = divmod(length, self.keys)
        return (chunks * self.keys * (self.keys + 1) + rest * (rest + 1)) / (2 * length)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Attention of a model. Grouped keys and values do not lower its FLOPs: query heads decide.

    Example:
        >>> layers = (Layers(count=118),)
        >>> shape = AttentionShape(heads=48, qk_width=256, v_width=256, sequence_length=2048, layers=layers)
        >>> shape.flops_per_token("palm")  # 12 L H Q T
        35634806784.0
    """

    heads: int
    qk_width: int
    v_width: int
    """Differs from ``qk_width`` in multi-head latent attention."""
    sequence_length: int
    layers: tuple[Layers, ...]
    is_causal: bool = True

    def flops_per_token(self, convention: str = "exact") -> float:
        """Training FLOPs per token: 2 FLOPs x (Dqk + Dv) for each head and key, forward once and backward twice.

        Args:
            convention: ``"exact"`` counts attended pairs, ``"palm"`` the full square.

        Raises:
            ConfigurationError: another convention, or windows without a causal mask.
        """
        if convention not in ("exact", "palm"):
            raise ConfigurationError(f"convention is {convention!r}; expected 'exact' or 'palm'")
        if not self.is_causal and any(group.keys for group in self.layers):
            raise ConfigurationError("windows are of causal attention; leave --bidirectional or --window out")
        length = self.sequence_length
        is_square = convention == "palm" or not self.is_causal
        keys = sum(group.count * (length if is_square else group.mean_keys(length)) for group in self.layers)
        return 3 * 2 * self.heads * (self.qk_width + self.v_width) * float(keys)


# --- N by logical shapes ----------------------------------------------------------------------------------------------


def non_embedding_parameters(model: nn.Module) -> int:
    """N: parameters that take part in products, each counted once, by their logical shapes.

    Token and position embeddings are look-ups and are left out; an output projection is a product and stays, also where
    it is tied to the embedding. Sharded parameters count their global shape, 4-bit ones the weight that they stand for.
    """
    embeddings = {id(p) for p in _embedding_weights(model)} - _product_weights(model)
    # `parameters` gives a tied parameter once
    return sum(logical_numel(p) for p in model.parameters() if id(p) not in embeddings)


def embedding_parameters(model: nn.Module) -> int:
    """Parameters that are only looked up in, by their logical shapes."""
    products = _product_weights(model)
    distinct = {id(p): p for p in _embedding_weights(model) if id(p) not in products}
    return sum(logical_numel(p) for p in distinct.values())


def logical_numel(parameter: torch.Tensor) -> int:
    """Elements of the tensor that a parameter stands for.

    A DTensor's shape is the global one. bitsandbytes packs a 4-bit weight into bytes and keeps its shape in
    ``quant_state.shape``; before the weight is moved to the device it still has its own shape.
    """
    quant_state = getattr(parameter, "quant_state", None)
    shape = getattr(quant_state, "shape", None)
    return math.prod(shape if shape is not None else parameter.shape)


def _embedding_weights(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield module.weight


def _product_weights(model: nn.Module) -> set[int]:
    """Weights of modules that are not embeddings, by identity: a tied output projection is one of them."""
    return {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
    }
