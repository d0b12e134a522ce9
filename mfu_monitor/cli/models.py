"""Models named on a command line: an import path, or a Hugging Face config file; built on the meta device."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.steps.batch import import_function

__all__ = ["LoadedModel", "build_from_config", "load_model", "parse_shape"]

META = torch.device("meta")
DEFAULT_SEQUENCE_LENGTH = 2048
"""Tokens of a sequence where neither the user nor the model says: short enough for any model, and printed."""
_SHAPE = re.compile(r"(\d+(?:[x,]\d+)*)(?::(\w+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on the meta device with the inputs of one step."""

    name: str
    module: nn.Module
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    tokens: int
    """What FLOPs are divided by: tokens of a batch, or samples where the input has no tokens."""
    unit: str
    """``"token"`` or ``"sample"``."""
    sequence_length: int | None = None
    config: Any = None
    """The Hugging Face configuration, where there is one."""


def load_model(
    source: str,
    *,
    batch_size: int = 1,
    sequence_length: int | None = None,
    shapes: list[str] | None = None,
    dtype: torch.dtype | None = None,
) -> LoadedModel:
    """The model that ``source`` names, with inputs for one step.

    Args:
        source: ``"package.module:factory"``, or a Hugging Face ``config.json`` or the folder that holds one.
        batch_size: sequences or samples of a batch.
        sequence_length: tokens of a sequence; default 2048, or the model's own limit if that is shorter.
        shapes: inputs of a factory's model, such as ``"2x3x224x224"`` or ``"2x128:int64"``, one each.
        dtype: of the parameters; default: the configuration's own, bf16 where it has none; a factory's model
            stays as it is.

    Raises:
        ConfigurationError: nothing of that name, or its inputs cannot be derived.
    """
    if ":" in source and not Path(source).exists():
        return _from_factory(source, shapes or [], dtype)
    if shapes:
        raise ConfigurationError(
            f"--shape {shapes[0]} is for a model by import path; the inputs of a configuration follow from "
            "--batch-size and --sequence-length."
        )
    return _from_config(Path(source), batch_size, sequence_length, dtype)


# --- an import path ---------------------------------------------------------------------------------------------------


def _from_factory(source: str, shapes: list[str], dtype: torch.dtype | None) -> LoadedModel:
    factory = _import_factory(source)
    made = _made_by(source, factory)
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise ConfigurationError(
            f"{source} returned {type(module).__name__}; expected a torch.nn.Module, or a pair of one and its inputs."
        )
    module = module.to(device=META, dtype=dtype)
    arguments, keywords = _inputs_of(source, module, inputs, [parse_shape(shape, module) for shape in shapes])
    tokens, unit = _tokens([*arguments, *keywords.values()])
    return LoadedModel(name=source, module=module, arguments=arguments, keywords=keywords, tokens=tokens, unit=unit)


def _made_by(source: str, factory: Callable[[], Any]) -> Any:
    try:
        with META:
            return factory()
    except Exception as error:
        raise ConfigurationError(
            f"{source}() failed: {type(error).__name__}: {error}. It is called without arguments and under "
            "torch.device('meta'), where tensors hold no values; write a small factory that makes the model so."
        ) from error


def _import_factory(source: str) -> Callable[[], Any]:
    # As with `python -m`, what lies in the current folder can be imported; a console script does not see it otherwise.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return import_function(source)
    except ImportError as error:
        raise ConfigurationError(
            f"{source!r} is not a model: {error}. Expected 'package.module:factory', importable from here (a function "
            "without arguments, or a class, that makes the model), or the path of a Hugging Face config.json."
        ) from error


def _inputs_of(
    source: str, module: nn.Module, inputs: Any, shapes: list[torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The user's shapes before the factory's own inputs, before Lightning's ``example_input_array``."""
    inputs = tuple(shapes) or (inputs if inputs is not None else getattr(module, "example_input_array", None))
    if inputs is None:
        raise ConfigurationError(
            f"{source}: what does the model take? Give its inputs by shape (--shape 2x3x224x224, for tokens "
            "--shape 2x128:int64), let the factory return (model, inputs), or set example_input_array on the model."
        )
    if isinstance(inputs, dict):
        return (), {key: _to_meta(value) for key, value in inputs.items()}
    return tuple(_to_meta(value) for value in (inputs if isinstance(inputs, (tuple, list)) else (inputs,))), {}


def parse_shape(text: str, module: nn.Module | None = None) -> torch.Tensor:
    """An input on the meta device from ``"2x3x224x224"`` or ``"2x128:int64"``.

    Without a dtype it has the dtype of the model's parameters.

    Example:
        >>> parse_shape("2x128:int64").shape
        torch.Size([2, 128])
    """
    match = _SHAPE.fullmatch(text.strip())
    dtype = getattr(torch, match[2], None) if match and match[2] else _parameter_dtype(module)
    if match is None or not isinstance(dtype, torch.dtype) or 0 in _sizes(match[1]):
        raise ConfigurationError(
            f"--shape {text!r} is not a shape; expected sizes above zero and, for what is not floating, a dtype: "
            "2x3x224x224, 2x128:int64."
        )
    return torch.empty(_sizes(match[1]), dtype=dtype, device=META)


def _sizes(text: str) -> list[int]:
    return [int(size) for size in re.split("[x,]", text)]


def _parameter_dtype(module: nn.Module | None) -> torch.dtype:
    parameters = module.parameters() if module is not None else iter(())
    return next((p.dtype for p in parameters if p.is_floating_point()), torch.get_default_dtype())


def _to_meta(value: Any) -> Any:
    return value.to(META) if isinstance(value, torch.Tensor) else value


def _tokens(inputs: list[Any]) -> tuple[int, str]:
    """Tokens of an integer tensor (B, T); else samples, the first dimension of the first tensor."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        if not tensor.is_floating_point() and tensor.dim() == 2:
            return tensor.numel(), "token"
    return (int(tensors[0].shape[0]) if tensors and tensors[0].dim() else 1), "sample"


# --- a Hugging Face configuration -------------------------------------------------------------------------------------


def _from_config(path: Path, batch_size: int, sequence_length: int | None, dtype: torch.dtype | None) -> LoadedModel:
    config = _read_config(path)
    config.use_cache = False
    limit = next(
        (int(n) for key in ("max_position_embeddings", "n_positions") if (n := getattr(config, key, None))), None
    )
    length = sequence_length or min(DEFAULT_SEQUENCE_LENGTH, limit or DEFAULT_SEQUENCE_LENGTH)
    module = _build(config, dtype or getattr(config, "dtype", None) or torch.bfloat16)
    keywords = _model_inputs(module, config, batch_size, length)
    tokens, unit = _tokens(list(keywords.values()))
    name = f"{type(module).__name__} ({path})"
    return LoadedModel(
        name=name,
        module=module,
        keywords=keywords,
        tokens=tokens,
        unit=unit,
        sequence_length=length if unit == "token" else None,
        config=config,
    )


def _read_config(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    try:
        kind = json.loads(file.read_text(encoding="utf-8"))["model_type"]
    except FileNotFoundError:
        seen = f"{str(path)!r} holds no config.json" if path.is_dir() else f"{str(path)!r} does not exist"
        raise ConfigurationError(
            f"{seen}; expected a Hugging Face config.json, a folder that holds one, or 'package.module:factory'."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{str(file)!r} is not a Hugging Face configuration ({type(error).__name__}: {error}); expected JSON with "
            "a 'model_type'."
        ) from None
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ConfigurationError(
            "a Hugging Face configuration needs transformers: pip install 'mfu-monitor[transformers]'."
        ) from None
    try:
        return AutoConfig.from_pretrained(str(file))
    except Exception as error:
        raise ConfigurationError(f"transformers cannot read {str(file)!r} (model_type {kind!r}): {error}") from error


def build_from_config(path: Path) -> nn.Module:
    """The model of a ``config.json`` on the meta device: its parameters' shapes, and no memory.

    Raises:
        ConfigurationError: transformers is not installed, or cannot build it.
    """
    return _build(_read_config(path), torch.bfloat16)


def _build(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model class that the configuration names, else the language model of its type, else its bare model."""
    import transformers

    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or []]
    builders = [cls._from_config for cls in named if cls is not None]
    builders += [transformers.AutoModelForCausalLM.from_config, transformers.AutoModel.from_config]
    failures = []
    for build in builders:
        try:
            with META:
                return build(config, dtype=dtype)  # type: ignore[no-any-return]
        except Exception as error:  # noqa: BLE001  (transformers raises anything for what it cannot build)
            failures.append(f"{type(error).__name__}: {error}")
    raise ConfigurationError(f"transformers cannot build a model of type {config.model_type!r}: {'; '.join(failures)}")


def _model_inputs(module: nn.Module, config: Any, batch_size: int, length: int) -> dict[str, Any]:
    main = getattr(module, "main_input_name", "input_ids")
    inputs: dict[str, Any] = {}
    if main == "pixel_values" or hasattr(config, "vision_config"):
        inputs["pixel_values"] = _pixels(getattr(config, "vision_config", config), batch_size, _parameter_dtype(module))
    if main == "input_features":
        # Whisper halves the frames in its second convolution, so a window holds twice its source positions.
        frames = 2 * getattr(config, "max_source_positions", length)
        shape = (batch_size, getattr(config, "num_mel_bins", 80), frames)
        inputs[main] = torch.empty(shape, dtype=_parameter_dtype(module), device=META)
    if main == "input_ids":
        inputs["input_ids"] = _token_ids(batch_size, _text_length(config, length))
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = _token_ids(
            batch_size, min(length, getattr(config, "max_target_positions", length))
        )
    return inputs


def _text_length(config: Any, length: int) -> int:
    limit = getattr(getattr(config, "text_config", None), "max_position_embeddings", None)
    return min(length, limit) if limit else length


def _token_ids(batch_size: int, length: int) -> torch.Tensor:
    return torch.empty((batch_size, length), dtype=torch.int64, device=META)


def _pixels(config: Any, batch_size: int, dtype: torch.dtype) -> torch.Tensor:
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.empty((batch_size, getattr(config, "num_channels", 3), height, width), dtype=dtype, device=META)
