"""Models of images and sound in tiny configurations, each with its closed form: ViT, CLIP, Whisper, a UNet, ResNet-50.

The last two are defined here: small, plain, and without a download.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .models import ModelCase, hf, tokens
from .tally import Tally

__all__ = ["VISION_MODELS", "ResNet50", "UNet"]

B, V = 2, 64
LAYERS = 2
CHANNELS, PATCH = 3, 4


def _encoder_layer(
    t: Tally,
    block: str,
    x: bool,
    S: int,
    D: int,
    hidden: int,
    heads: int,
    names: tuple[str, ...],
    *,
    is_causal: bool = False,
) -> bool:
    """A pre-norm layer; ``names`` of the first norm, attention, its output, the second norm and the two linears."""
    norm_1, attention, out, norm_2, fc1, fc2 = (f"{block}.{name}" for name in names)
    y = t.parameters(norm_1, x)
    q, k, v = (t.linear(f"{attention}.{n}_proj", y, B * S, D, D) for n in ("q", "k", "v"))
    y = t.attend(attention, (q, k, v), batch=B, heads=heads, queries=S, keys=S, width=D // heads, is_causal=is_causal)
    x |= t.linear(out, y, B * S, D, D)
    y = t.parameters(norm_2, x)
    y = t.linear(fc1, y, B * S, D, hidden)
    return x | t.linear(fc2, y, B * S, hidden, D)


# --- ViT -------------------------------------------------------------------------------------------------------------

VIT_D, VIT_F, VIT_H, CLASSES = 32, 48, 4, 5


def _image(patches: int) -> torch.Tensor:
    side = PATCH * math.isqrt(patches)
    return torch.ones(B, CHANNELS, side, side)


def build_vit(patches: int, attention: str) -> tuple[Any, Mapping[str, Any]]:
    config = hf.ViTConfig(
        hidden_size=VIT_D, num_hidden_layers=LAYERS, num_attention_heads=VIT_H, intermediate_size=VIT_F,
        image_size=PATCH * math.isqrt(patches), patch_size=PATCH, num_labels=CLASSES, attn_implementation=attention,
    )  # fmt: skip
    labels = torch.zeros(B, dtype=torch.long)
    return hf.ViTForImageClassification(config), {"pixel_values": _image(patches), "labels": labels}


VIT_NAMES = ("layernorm_before", "attention", "attention.o_proj", "layernorm_after", "mlp.fc1", "mlp.fc2")


def vit(t: Tally, patches: int) -> None:
    """A patch is one product of CHANNELS PATCH^2 by D; the class token makes S = patches + 1; its output is classified.

    Pixels ask for no gradient, so the patches' backward has a weight gradient only.
    """
    S = patches + 1
    x = t.conv(
        "vit.embeddings.patch_embeddings.projection", False,
        positions=B * patches, C_in=CHANNELS, C_out=VIT_D, taps=PATCH**2,
    )  # fmt: skip
    x = t.parameters("vit.embeddings", x)
    for i in range(LAYERS):
        with t.checkpointed(ends_with_product=True):
            x = t.without_backward(_encoder_layer(t, f"vit.layers.{i}", x, S, VIT_D, VIT_F, VIT_H, VIT_NAMES))
    x = t.parameters("vit.layernorm", x)
    t.linear("classifier", x, B, VIT_D, CLASSES)


# --- CLIP ------------------------------------------------------------------------------------------------------------

TEXT_D, TEXT_F, TEXT_H = 32, 48, 4
IMAGE_D, IMAGE_F, IMAGE_H, PATCHES = 24, 40, 3, 16
SHARED_D = 20


def build_clip(S: int, attention: str) -> tuple[Any, Mapping[str, Any]]:
    text = {
        "hidden_size": TEXT_D,
        "intermediate_size": TEXT_F,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": TEXT_H,
        "vocab_size": V,
        "max_position_embeddings": 2 * S,
        "bos_token_id": 62,
        "eos_token_id": 63,
        "pad_token_id": 61,
    }
    image = {
        "hidden_size": IMAGE_D,
        "intermediate_size": IMAGE_F,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": IMAGE_H,
        "image_size": PATCH * math.isqrt(PATCHES),
        "patch_size": PATCH,
    }
    config = hf.CLIPConfig(
        text_config=text, vision_config=image, projection_dim=SHARED_D, attn_implementation=attention
    )
    inputs = {"input_ids": tokens(S), "pixel_values": _image(PATCHES), "return_loss": True}
    return hf.CLIPModel(config), inputs


CLIP_NAMES = ("layer_norm1", "self_attn", "self_attn.out_proj", "layer_norm2", "mlp.fc1", "mlp.fc2")


def clip(t: Tally, S: int) -> None:
    """Two towers (the text's causal), a projection of one token each, and all texts against all images."""
    x = t.conv(
        "vision_model.embeddings.patch_embedding", False,
        positions=B * PATCHES, C_in=CHANNELS, C_out=IMAGE_D, taps=PATCH**2,
    )  # fmt: skip
    x |= t.embedding("vision_model.embeddings")
    x = t.parameters("vision_model.pre_layrnorm", x)
    for i in range(LAYERS):
        block = f"vision_model.encoder.layers.{i}"
        with t.checkpointed(ends_with_product=True):
            x = t.without_backward(_encoder_layer(t, block, x, PATCHES + 1, IMAGE_D, IMAGE_F, IMAGE_H, CLIP_NAMES))
    image = t.linear("visual_projection", t.parameters("vision_model.post_layernorm", x), B, IMAGE_D, SHARED_D)
    x = t.embedding("text_model.embeddings")
    for i in range(LAYERS):
        block = f"text_model.encoder.layers.{i}"
        with t.checkpointed(ends_with_product=True):
            x = t.without_backward(_encoder_layer(t, block, x, S, TEXT_D, TEXT_F, TEXT_H, CLIP_NAMES, is_causal=True))
    text = t.linear("text_projection", t.parameters("text_model.final_layer_norm", x), B, TEXT_D, SHARED_D)
    t.product("", 2 * B * SHARED_D * B, text, image)


# --- Whisper ---------------------------------------------------------------------------------------------------------

MEL, WHISPER_D, WHISPER_F, WHISPER_H = 8, 32, 48, 4


def build_whisper(S: int, attention: str) -> tuple[Any, Mapping[str, Any]]:
    config = hf.WhisperConfig(
        d_model=WHISPER_D, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=WHISPER_H,
        decoder_attention_heads=WHISPER_H, encoder_ffn_dim=WHISPER_F, decoder_ffn_dim=WHISPER_F, vocab_size=V,
        num_mel_bins=MEL, max_source_positions=S, max_target_positions=S, dropout=0, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None, suppress_tokens=None,
        attn_implementation=attention,
    )  # fmt: skip
    inputs = {"input_features": torch.ones(B, MEL, 2 * S), "labels": tokens(S // 2)}
    return hf.WhisperForConditionalGeneration(config), inputs


WHISPER_NAMES = ("self_attn_layer_norm", "self_attn", "self_attn.out_proj", "final_layer_norm", "fc1", "fc2")


def _whisper_attention(t: Tally, name: str, x: bool, memory: bool, queries: int, keys: int, *, is_causal: bool) -> bool:
    D = WHISPER_D
    q = t.linear(f"{name}.q_proj", x, B * queries, D, D)
    k = t.linear(f"{name}.k_proj", memory, B * keys, D, D)
    v = t.linear(f"{name}.v_proj", memory, B * keys, D, D)
    y = t.attend(
        name, (q, k, v), batch=B, heads=WHISPER_H, queries=queries, keys=keys, width=D // WHISPER_H, is_causal=is_causal
    )
    return t.linear(f"{name}.out_proj", y, B * queries, D, D)


def whisper(t: Tally, S: int) -> None:
    """2 S frames, halved by the second convolution to S positions of the encoder; a decoder of S / 2 tokens."""
    D, S_decoder = WHISPER_D, S // 2
    memory = t.conv("model.encoder.conv1", False, positions=B * 2 * S, C_in=MEL, C_out=D, taps=3)
    memory = t.conv("model.encoder.conv2", memory, positions=B * S, C_in=D, C_out=D, taps=3)
    for i in range(LAYERS):
        block = f"model.encoder.layers.{i}"
        with t.checkpointed(ends_with_product=True):
            memory = t.without_backward(_encoder_layer(t, block, memory, S, D, WHISPER_F, WHISPER_H, WHISPER_NAMES))
    memory = t.parameters("model.encoder.layer_norm", memory)
    x = t.parameters("model.decoder.embed_tokens") or t.parameters("model.decoder.embed_positions")
    for i in range(LAYERS):
        block = f"model.decoder.layers.{i}"
        with t.checkpointed(ends_with_product=True):
            y = t.parameters(f"{block}.self_attn_layer_norm", x)
            x |= _whisper_attention(t, f"{block}.self_attn", y, y, S_decoder, S_decoder, is_causal=True)
            y = t.parameters(f"{block}.encoder_attn_layer_norm", x)
            x |= _whisper_attention(t, f"{block}.encoder_attn", y, memory, S_decoder, S, is_causal=False)
            y = t.parameters(f"{block}.final_layer_norm", x)
            y = t.linear(f"{block}.fc1", y, B * S_decoder, D, WHISPER_F)
            x |= t.linear(f"{block}.fc2", y, B * S_decoder, WHISPER_F, D)
            t.without_backward(x)
    x = t.parameters("model.decoder.layer_norm", x)
    t.linear("proj_out", x, B * S_decoder, D, V, weight="model.decoder.embed_tokens")


# --- a diffusion UNet ------------------------------------------------------------------------------------------------

UNET_C, UNET_TIME, UNET_CONTEXT_D, UNET_CONTEXT_S, UNET_H = 8, 16, 12, 6, 2
"""Channels at full resolution (twice that below), width of the time embedding, width and length of the context."""


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with the time embedding added between them, and a 1x1 where the channels change."""

    def __init__(self, C_in: int, C_out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, C_in), nn.Conv2d(C_in, C_out, 3, padding=1)
        self.time = nn.Linear(UNET_TIME, C_out)
        self.norm2, self.conv2 = nn.GroupNorm(4, C_out), nn.Conv2d(C_out, C_out, 3, padding=1)
        self.skip = nn.Conv2d(C_in, C_out, 1) if C_in != C_out else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> Any:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class Attention(nn.Module):
    """Attention of the image to itself, or to a context of another width."""

    def __init__(self, D: int, D_context: int) -> None:
        super().__init__()
        self.to_q = nn.Linear(D, D, bias=False)
        self.to_k, self.to_v = nn.Linear(D_context, D, bias=False), nn.Linear(D_context, D, bias=False)
        self.to_out = nn.Linear(D, D)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> Any:
        q, k, v = (
            layer(y).unflatten(-1, (UNET_H, -1)).transpose(1, 2)
            for layer, y in ((self.to_q, x), (self.to_k, context), (self.to_v, context))
        )
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Self attention, cross attention and a feed-forward over the pixels."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.norm1, self.self_attention = nn.LayerNorm(D), Attention(D, D)
        self.norm2, self.cross_attention = nn.LayerNorm(D), Attention(D, UNET_CONTEXT_D)
        self.norm3, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, image: torch.Tensor, context: torch.Tensor) -> Any:
        x = image.flatten(2).transpose(1, 2)
        y = self.norm1(x)
        x = x + self.self_attention(y, y)
        x = x + self.cross_attention(self.norm2(x), context)
        x = x + self.down(F.gelu(self.up(self.norm3(x))))
        return x.transpose(1, 2).unflatten(2, image.shape[2:])


class UNet(nn.Module):
    """One level down, attention in the middle, one level up; the noise is predicted."""

    def __init__(self) -> None:
        super().__init__()
        C = UNET_C
        self.time_in, self.time_out = nn.Linear(UNET_TIME, UNET_TIME), nn.Linear(UNET_TIME, UNET_TIME)
        self.conv_in = nn.Conv2d(CHANNELS, C, 3, padding=1)
        self.down_block = ResidualBlock(C, C)
        self.down = nn.Conv2d(C, C, 3, stride=2, padding=1)
        self.mid_block = ResidualBlock(C, 2 * C)
        self.mid_attention = TransformerBlock(2 * C)
        self.up = nn.ConvTranspose2d(2 * C, C, 4, stride=2, padding=1)
        self.up_block = ResidualBlock(2 * C, C)
        self.norm_out, self.conv_out = nn.GroupNorm(4, C), nn.Conv2d(C, CHANNELS, 3, padding=1)
        self.use_reentrant: bool | None = None

    def forward(self, image: torch.Tensor, time: torch.Tensor, context: torch.Tensor) -> Any:
        t = self.time_out(F.silu(self.time_in(time)))
        x = skip = self._run(self.down_block, self.conv_in(image), t)
        x = self._run(self.mid_block, self.down(x), t)
        x = self.up(self._run(self.mid_attention, x, context))
        x = self._run(self.up_block, torch.cat((x, skip), dim=1), t)
        return (self.conv_out(F.silu(self.norm_out(x))) - image).square().mean()

    def _run(self, block: nn.Module, *inputs: torch.Tensor) -> Any:
        if self.use_reentrant is None:
            return block(*inputs)
        return checkpoint(block, *inputs, use_reentrant=self.use_reentrant)


def build_unet(S: int, attention: str) -> tuple[Any, Mapping[str, Any]]:
    """S positions in the middle: an image of 4 rows and S columns, halved once in both directions."""
    assert attention == "sdpa"
    inputs = {
        "image": torch.ones(B, CHANNELS, 4, S),
        "time": torch.ones(B, UNET_TIME),
        "context": torch.ones(B, UNET_CONTEXT_S, UNET_CONTEXT_D),
    }
    return UNet(), inputs


def _residual_block(t: Tally, name: str, x: bool, time: bool, positions: int, C_in: int, C_out: int) -> bool:
    with t.checkpointed(ends_with_product=True):
        y = t.parameters(f"{name}.norm1", x)
        y = t.conv(f"{name}.conv1", y, positions=positions, C_in=C_in, C_out=C_out, taps=9)
        y |= t.linear(f"{name}.time", time, B, UNET_TIME, C_out)
        # In the order they run: the skip's convolution comes before the last one.
        skip = x
        if C_in != C_out:
            skip = t.conv(f"{name}.skip", x, positions=positions, C_in=C_in, C_out=C_out, taps=1)
        y = t.parameters(f"{name}.norm2", y)
        y = t.conv(f"{name}.conv2", y, positions=positions, C_in=C_out, C_out=C_out, taps=9)
        return t.without_backward(skip or y)


def _unet_attention(t: Tally, name: str, x: bool, memory: bool, S: int, keys: int, D_memory: int) -> bool:
    D = 2 * UNET_C
    q = t.linear(f"{name}.to_q", x, B * S, D, D)
    k, v = (t.linear(f"{name}.to_{n}", memory, B * keys, D_memory, D) for n in "kv")
    y = t.attend(name, (q, k, v), batch=B, heads=UNET_H, queries=S, keys=keys, width=D // UNET_H)
    return t.linear(f"{name}.to_out", y, B * S, D, D)


def _unet_transformer(t: Tally, name: str, x: bool, S: int) -> bool:
    D = 2 * UNET_C
    with t.checkpointed(ends_with_product=True):
        y = t.parameters(f"{name}.norm1", x)
        x |= _unet_attention(t, f"{name}.self_attention", y, y, S, S, D)
        y = t.parameters(f"{name}.norm2", x)
        x |= _unet_attention(t, f"{name}.cross_attention", y, False, S, UNET_CONTEXT_S, UNET_CONTEXT_D)
        y = t.parameters(f"{name}.norm3", x)
        y = t.linear(f"{name}.up", y, B * S, D, 4 * D)
        return t.without_backward(x | t.linear(f"{name}.down", y, B * S, 4 * D, D))


def unet(t: Tally, S: int) -> None:
    """Image, time and context ask for no gradient. Full resolution has 4 S positions, the middle 2 x S / 2 = S.

    The transposed 4x4 convolution spreads each of its S inputs over 16 taps.
    """
    C, full, low = UNET_C, B * 4 * S, B * S
    time = t.linear("time_out", t.linear("time_in", False, B, UNET_TIME, UNET_TIME), B, UNET_TIME, UNET_TIME)
    x = t.conv("conv_in", False, positions=full, C_in=CHANNELS, C_out=C, taps=9)
    x = skip = _residual_block(t, "down_block", x, time, full, C, C)
    x = t.conv("down", x, positions=low, C_in=C, C_out=C, taps=9)
    x = _residual_block(t, "mid_block", x, time, low, C, 2 * C)
    x = _unet_transformer(t, "mid_attention", x, S)
    x = t.conv("up", x, positions=low, C_in=2 * C, C_out=C, taps=16)
    x = _residual_block(t, "up_block", x or skip, time, full, 2 * C, C)
    x = t.parameters("norm_out", x)
    t.conv("conv_out", x, positions=full, C_in=C, C_out=CHANNELS, taps=9)


# --- ResNet-50 -------------------------------------------------------------------------------------------------------

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Width and number of blocks of the four stages (He et al. 2015, "Deep Residual Learning", table 1)."""
EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3 (which carries the stride), 1x1; a 1x1 beside it where the shape changes."""

    def __init__(self, C_in: int, width: int, stride: int) -> None:
        super().__init__()
        C_out = EXPANSION * width
        self.conv1, self.norm1 = nn.Conv2d(C_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, C_out, 1, bias=False), nn.BatchNorm2d(C_out)
        self.skip: nn.Module = nn.Identity()
        if C_in != C_out:
            self.skip = nn.Sequential(nn.Conv2d(C_in, C_out, 1, stride, bias=False), nn.BatchNorm2d(C_out))

    def forward(self, x: torch.Tensor) -> Any:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.skip(x) + self.norm3(self.conv3(y)))


class ResNet50(nn.Module):
    """For images of 224 x 224 and 1000 classes; gives the mean of the scores as its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(CHANNELS, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.stages, C = nn.ModuleList(), 64
        for number, (width, blocks) in enumerate(STAGES):
            stage = nn.Sequential()
            for block in range(blocks):
                stage.append(Bottleneck(C, width, 2 if block == 0 and number > 0 else 1))
                C = EXPANSION * width
            self.stages.append(stage)
        self.fc = nn.Linear(C, 1000)
        self.use_reentrant: bool | None = None

    def forward(self, image: torch.Tensor) -> Any:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(image))), 3, 2, 1)
        for stage in self.stages:
            x = stage(x) if self.use_reentrant is None else checkpoint(stage, x, use_reentrant=self.use_reentrant)
        return self.fc(x.mean((2, 3))).mean()


def build_resnet50(side: int, attention: str) -> tuple[Any, Mapping[str, Any]]:
    return ResNet50(), {"image": torch.ones(1, CHANNELS, side, side)}


def resnet50(t: Tally, side: int) -> None:
    """Every stride halves the side: 224 -> 112 (7x7) -> 56 (pooling), and once more before each stage but the first.

    A checkpointed stage ends with a norm, which keeps its last product's result.
    """
    side //= 2
    x = t.conv("conv1", False, positions=side**2, C_in=CHANNELS, C_out=64, taps=49)
    x = t.parameters("norm1", x)
    side, C = side // 2, 64
    for number, (width, blocks) in enumerate(STAGES):
        with t.checkpointed(ends_with_product=False):
            for block in range(blocks):
                side_in = side
                side = side // 2 if block == 0 and number > 0 else side
                x = _bottleneck(t, f"stages.{number}.{block}", x, side_in**2, side**2, C, width)
                C = EXPANSION * width
            t.without_backward(x)
    t.linear("fc", x, 1, C, 1000)


def _bottleneck(t: Tally, name: str, x: bool, positions_in: int, positions: int, C_in: int, width: int) -> bool:
    C_out = EXPANSION * width
    y = t.conv(f"{name}.conv1", x, positions=positions_in, C_in=C_in, C_out=width, taps=1)
    y = t.parameters(f"{name}.norm1", y)
    y = t.conv(f"{name}.conv2", y, positions=positions, C_in=width, C_out=width, taps=9)
    y = t.parameters(f"{name}.norm2", y)
    skip = x
    if C_in != C_out:
        skip = t.conv(f"{name}.skip.0", x, positions=positions, C_in=C_in, C_out=C_out, taps=1)
        skip = t.parameters(f"{name}.skip.1", skip)
    y = t.conv(f"{name}.conv3", y, positions=positions, C_in=width, C_out=C_out, taps=1)
    return t.parameters(f"{name}.norm3", y) or skip


def _checkpoint_blocks(model: Any, reentrant: bool) -> None:
    model.use_reentrant = reentrant


VISION_MODELS: tuple[ModelCase, ...] = (
    ModelCase(
        id="vit",
        build=build_vit,
        closed_form=vit,
        S=16,
        frozen_bottom=("vit.embeddings", "vit.layers.0"),
        frozen_top=("vit.layers.1",),
        lora_targets=("q_proj", "v_proj"),
    ),
    ModelCase(
        id="clip",
        build=build_clip,
        closed_form=clip,
        frozen_bottom=(
            "text_model.embeddings",
            "text_model.encoder.layers.0",
            "vision_model.embeddings",
            "vision_model.pre_layrnorm",
            "vision_model.encoder.layers.0",
        ),
        frozen_top=("text_model.encoder.layers.1", "vision_model.encoder.layers.1"),
        fixed=r"vision_model\..*|.*_projection|",
        attends_to_fixed=r"vision_model\..*",
        lora_targets=("q_proj", "v_proj"),
    ),
    ModelCase(
        id="whisper",
        build=build_whisper,
        closed_form=whisper,
        frozen_bottom=(
            "model.encoder",
            "model.decoder.embed_tokens",
            "model.decoder.embed_positions",
            "model.decoder.layers.0",
        ),
        frozen_top=("model.encoder.layers.1", "model.decoder.layers.1"),
        lora_targets=("q_proj", "v_proj"),
    ),
    ModelCase(
        id="unet",
        build=build_unet,
        closed_form=unet,
        S=8,
        frozen_bottom=("time_in", "time_out", "conv_in", "down_block", "down", "mid_block"),
        frozen_top=("up", "up_block", "norm_out", "conv_out"),
        fixed=r"time_.*|.*\.time|.*\.cross_attention\.to_[kv]",
        attends_to_fixed=r".*\.cross_attention",
        lora_targets=("to_q", "to_v", "conv2"),
        checkpoint=_checkpoint_blocks,
        has_eager_attention=False,
    ),
    ModelCase(
        id="resnet50",
        build=build_resnet50,
        closed_form=resnet50,
        S=224,
        device="meta",
        frozen_bottom=("conv1", "norm1", "stages.0", "stages.1"),
        frozen_top=("stages.2", "stages.3", "fc"),
        lora_targets=("conv2", "fc"),
        checkpoint=_checkpoint_blocks,
        has_eager_attention=False,
    ),
)
