"""A Hugging Face ``config.json`` as an audit needs it: attention's shapes by layer, and the parameters."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfu_monitor.cli.models import build_from_config
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.formulas.analytic import AttentionShape, Layers, logical_numel, non_embedding_parameters

__all__ = ["ModelConfig", "read_model_config"]

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where the configuration of a model with vision or audio keeps its language model."""
_EXPERT = re.compile(r"(^|\.)experts\.")
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a configuration says of a model."""

    path: Path
    attention: AttentionShape
    content: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def parameters(self) -> tuple[float, float]:
        """N and active N: parameters that take part in a product, all of them and those of one token.

        Raises:
            ConfigurationError: transformers is not installed, or cannot build such a model.
        """
        module = build_from_config(self.path)
        experts = sum(logical_numel(p) for name, p in module.named_parameters() if _EXPERT.search(name))
        total, routed = _known(self.content, "experts"), _known(self.content, "experts_per_token")
        inactive = experts * (1 - routed / total) if experts and total and routed else 0.0
        n = float(non_embedding_parameters(module))
        return n, n - inactive


def read_model_config(path: Path, sequence_length: int) -> ModelConfig:
    """The configuration in a file, or in the folder that holds it.

    Args:
        path: ``config.json``, or its folder.
        sequence_length: tokens of a training sequence; a configuration knows the longest one only.

    Raises:
        ConfigurationError: not such a file, or a kind of model whose attention it does not describe.

    Example:
        >>> read_model_config(Path("config.json"), 4096).attention.layers
        (Layers(count=32, keys=None, is_chunked=False),)
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--config {str(path)!r} cannot be read: {error}; expected a config.json") from None
    if not isinstance(content, dict) or content.get("is_encoder_decoder"):
        raise ConfigurationError(
            f"--config {str(path)!r} is not a decoder's configuration; give --params, --layers, --heads, --head-width"
        )
    part = next((name for name in _TEXT_PARTS if isinstance(content.get(name), dict)), None)
    text = content[part] if part else content
    layers, heads, hidden = (_known(text, name) for name in ("layers", "heads", "hidden"))
    if not layers or not heads or not (hidden or text.get("head_dim")):
        raise ConfigurationError(
            f"--config {str(path)!r} names no layers, heads or hidden size; give --layers, --heads and --head-width"
        )
    width = int(text.get("head_dim") or hidden // heads)
    qk_width, v_width = _latent_widths(text) or (width, width)
    kinds, notes = _layers(text, layers)
    if part:
        notes = (*notes, f"attention is that of {part}: the other towers' attention is left out")
    attention = AttentionShape(
        heads=heads, qk_width=qk_width, v_width=v_width, sequence_length=sequence_length, layers=kinds
    )
    return ModelConfig(path=file, attention=attention, content=text, notes=notes)


def _known(text: Mapping[str, Any], name: str) -> int:
    return next((int(text[key]) for key in _NAMES[name] if isinstance(text.get(key), int | float)), 0)


def _latent_widths(text: Mapping[str, Any]) -> tuple[int, int] | None:
    """Multi-head latent attention: queries and keys have a part with positions, values have a width of their own."""
    if not text.get("kv_lora_rank") or not text.get("qk_nope_head_dim"):
        return None
    return int(text["qk_nope_head_dim"]) + int(text.get("qk_rope_head_dim") or 0), int(text["v_head_dim"])


def _layers(text: Mapping[str, Any], count: int) -> tuple[tuple[Layers, ...], tuple[str, ...]]:
    """Groups of layers with one reach, and what is to be said of them."""
    window, chunk = text.get("sliding_window"), text.get("attention_chunk_size")
    kinds = Counter(text.get("layer_types") or _kinds_without_a_list(text, count))
    notes = []
    groups = []
    for kind, number in kinds.items():
        if kind == "sliding_attention" and window:
            groups.append(Layers(count=number, keys=int(window)))
        elif kind == "chunked_attention" and chunk:
            groups.append(Layers(count=number, keys=int(chunk), is_chunked=True))
        elif kind in ("full_attention", "sliding_attention", "chunked_attention", "attention"):
            groups.append(Layers(count=number))
        else:
            notes.append(f"{number} layers of {kind} have no query-key pairs and are left out")
    return tuple(groups), tuple(notes)


def _kinds_without_a_list(text: Mapping[str, Any], count: int) -> list[str]:
    """By the switches of configurations from before ``layer_types``."""
    full, sliding = "full_attention", "sliding_attention"
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return [full] * count
    if pattern := text.get("sliding_window_pattern"):
        return [full if (i + 1) % int(pattern) == 0 else sliding for i in range(count)]
    if text.get("model_type") == "gemma2":
        return [sliding if i % 2 == 0 else full for i in range(count)]
    if "use_sliding_window" in text and text.get("max_window_layers") is not None:
        return [sliding if i >= int(text["max_window_layers"]) else full for i in range(count)]
    return [sliding] * count
