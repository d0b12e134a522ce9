"""Language models of transformers in tiny configurations, each with its closed form: products from shapes alone.

B sequences of S tokens, T = B S; D the model's width, F the feed-forward's, V the vocabulary, H heads of width d.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from .tally import Tally

__all__ = ["TEXT_MODELS", "ModelCase", "tokens"]

hf: Any = transformers
"""Its configurations take more arguments than their signatures say."""
B, V = 2, 64
LAYERS = 2


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A model, its input and its closed form, for any sequence length."""

    id: str
    build: Callable[[int, str], tuple[Any, Mapping[str, Any]]]
    """From a sequence length and an attention implementation: the model and the arguments of its forward."""
    closed_form: Callable[[Tally, int], None]
    """Adds every product of one step to the tally."""
    frozen_bottom: tuple[str, ...] = ()
    """Embeddings and the first half of the layers."""
    frozen_top: tuple[str, ...] = ()
    """The second half of the layers."""
    lora_targets: tuple[str, ...] = ()
    S: int = 12
    device: str = "cpu"
    checkpoint: Callable[[Any, bool], None] | None = None
    """Turns checkpointing on (reentrant or not); None for ``gradient_checkpointing_enable``."""
    fixed: str | None = None
    """A pattern of the modules whose work does not grow with the sequence."""
    attends_to_fixed: str | None = None
    """A pattern of the attention modules whose keys do not grow with the sequence."""
    has_eager_attention: bool = True
    """Whether it can run its attention as plain products."""


def tokens(S: int) -> torch.Tensor:
    """Token ids (B, S), none of them special."""
    return (torch.arange(B * S).view(B, S) * 7) % (V - 8)


def _language_model(S: int) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(S), "labels": tokens(S)}


# --- GPT-2 -----------------------------------------------------------------------------------------------------------

GPT2_D, GPT2_H = 32, 4


def build_gpt2(S: int, attention: str) -> tuple[Any, Mapping[str, Any]]:
    config = hf.GPT2Config(
        n_embd=GPT2_D, n_layer=LAYERS, n_head=GPT2_H, vocab_size=V, n_positions=2 * S, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=1, eos_token_id=2, attn_implementation=attention,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config), _language_model(S)


def gpt2(t: Tally, S: int) -> None:
    """Forward: L (24 T D^2 + attention) + 2 T D V; the head's weight is the embedding's."""
    T, D = B * S, GPT2_D
    x = t.embedding("transformer.wte") or t.parameters("transformer.wpe")
    for i in range(LAYERS):
        block = f"transformer.h.{i}"
        with t.checkpointed(ends_with_product=True):
            y = t.parameters(f"{block}.ln_1", x)
            qkv = t.linear(f"{block}.attn.c_attn", y, T, D, 3 * D)
            y = t.attend(
                f"{block}.attn", (qkv,) * 3, batch=B, heads=GPT2_H, queries=S, keys=S, width=D // GPT2_H, is_causal=True
            )
            x |= t.linear(f"{block}.attn.c_proj", y, T, D, D)
            y = t.parameters(f"{block}.ln_2", x)
            y = t.linear(f"{block}.mlp.c_fc", y, T, D, 4 * D)
            x |= t.linear(f"{block}.mlp.c_proj", y, T, 4 * D, D)
            t.without_backward(x)
    x = t.parameters("transformer.ln_f", x)
    t.linear("lm_head", x, T, D, V, weight="transformer.wte")


# --- Llama, Mixtral --------------------------------------------------------------------------------------------------

LLAMA_D, LLAMA_F, LLAMA_H, LLAMA_KV = 32, 48, 4, 2
EXPERTS, TOP_K = 4, 2


def _llama_sizes(S: int, attention: str) -> dict[str, Any]:
    return {
        "hidden_size": LLAMA_D,
        "intermediate_size": LLAMA_F,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": LLAMA_H,
        "num_key_value_heads": LLAMA_KV,
        "vocab_size": V,
        "max_position_embeddings": 2 * S,
        "attn_implementation": attention,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def build_llama(S: int, attention: str) -> tuple[Any, Mapping[str, Any]]:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**_llama_sizes(S, attention)))
    return model, _language_model(S)


def build_mixtral(S: int, attention: str) -> tuple[Any, Mapping[str, Any]]:
    config = hf.MixtralConfig(**_llama_sizes(S, attention), num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
    return hf.MixtralForCausalLM(config), _language_model(S)


def _llama_attention(t: Tally, block: str, x: bool, S: int) -> bool:
    """Query heads decide: two products over H heads, though K and V have fewer."""
    T, D, d = B * S, LLAMA_D, LLAMA_D // LLAMA_H
    y = t.parameters(f"{block}.input_layernorm", x)
    q = t.linear(f"{block}.self_attn.q_proj", y, T, D, LLAMA_H * d)
    k = t.linear(f"{block}.self_attn.k_proj", y, T, D, LLAMA_KV * d)
    v = t.linear(f"{block}.self_attn.v_proj", y, T, D, LLAMA_KV * d)
    y = t.attend(f"{block}.self_attn", (q, k, v), batch=B, heads=LLAMA_H, queries=S, keys=S, width=d, is_causal=True)
    return x | t.linear(f"{block}.self_attn.o_proj", y, T, LLAMA_H * d, D)


def llama(t: Tally, S: int) -> None:
    T, D, F = B * S, LLAMA_D, LLAMA_F
    x = t.embedding("model.embed_tokens")
    for i in range(LAYERS):
        block = f"model.layers.{i}"
        with t.checkpointed(ends_with_product=True):
            x = _llama_attention(t, block, x, S)
            y = t.parameters(f"{block}.post_attention_layernorm", x)
            gate = t.linear(f"{block}.mlp.gate_proj", y, T, D, F)
            up = t.linear(f"{block}.mlp.up_proj", y, T, D, F)
            x |= t.linear(f"{block}.mlp.down_proj", gate or up, T, F, D)
            t.without_backward(x)
    x = t.parameters("model.norm", x)
    t.linear("lm_head", x, T, D, V)


def mixtral(t: Tally, S: int) -> None:
    """Each token runs TOP_K of the EXPERTS: T TOP_K rows through one expert's matrices, whichever experts they are."""
    T, D, F = B * S, LLAMA_D, LLAMA_F
    x = t.embedding("model.embed_tokens")
    for i in range(LAYERS):
        block = f"model.layers.{i}"
        with t.checkpointed(ends_with_product=False):  # each expert's output is kept: it is weighted by the router
            x = _llama_attention(t, block, x, S)
            y = t.parameters(f"{block}.post_attention_layernorm", x)
            router = t.linear(f"{block}.mlp.gate", y, T, D, EXPERTS)
            trained = t.setup.is_trained(f"{block}.mlp.experts")
            hidden = t.product(f"{block}.mlp.experts", 2 * T * TOP_K * D * 2 * F, y, trained)  # gate and up in one
            out = t.product(f"{block}.mlp.experts", 2 * T * TOP_K * F * D, hidden, trained)
            x |= router or out
            t.without_backward(x)
    x = t.parameters("model.norm", x)
    t.linear("lm_head", x, T, D, V)


# --- BERT ------------------------------------------------------------------------------------------------------------

BERT_D, BERT_F, BERT_H = 32, 48, 4


def build_bert(S: int, attention: str) -> tuple[Any, Mapping[str, Any]]:
    config = hf.BertConfig(
        hidden_size=BERT_D, num_hidden_layers=LAYERS, num_attention_heads=BERT_H, intermediate_size=BERT_F,
        vocab_size=V, max_position_embeddings=2 * S, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        attn_implementation=attention,
    )  # fmt: skip
    return hf.BertForMaskedLM(config), _language_model(S)


def bert(t: Tally, S: int) -> None:
    """Norms come after each residual sum, so a checkpointed layer keeps its last product's result."""
    T, D, F = B * S, BERT_D, BERT_F
    x = t.embedding("bert.embeddings")
    for i in range(LAYERS):
        block = f"bert.encoder.layer.{i}"
        with t.checkpointed(ends_with_product=False):
            q, k, v = (t.linear(f"{block}.attention.self.{n}", x, T, D, D) for n in ("query", "key", "value"))
            y = t.attend(
                f"{block}.attention.self", (q, k, v), batch=B, heads=BERT_H, queries=S, keys=S, width=D // BERT_H
            )
            x |= t.linear(f"{block}.attention.output.dense", y, T, D, D)
            x = t.parameters(f"{block}.attention.output.LayerNorm", x)
            y = t.linear(f"{block}.intermediate.dense", x, T, D, F)
            x |= t.linear(f"{block}.output.dense", y, T, F, D)
            x = t.without_backward(t.parameters(f"{block}.output.LayerNorm", x))
    x = t.linear("cls.predictions.transform.dense", x, T, D, D)
    x = t.parameters("cls.predictions.transform.LayerNorm", x)
    t.linear("cls.predictions.decoder", x, T, D, V, weight="bert.embeddings")


# --- T5 --------------------------------------------------------------------------------------------------------------

T5_D, T5_F, T5_H, T5_d = 32, 48, 4, 8


def build_t5(S: int, attention: str) -> tuple[Any, Mapping[str, Any]]:
    config = hf.T5Config(
        d_model=T5_D, d_kv=T5_d, d_ff=T5_F, num_layers=LAYERS, num_heads=T5_H, vocab_size=V, dropout_rate=0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, attn_implementation=attention,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config), {"input_ids": tokens(S), "labels": tokens(S // 2)}


def _t5_attention(t: Tally, name: str, x: bool, memory: bool, queries: int, keys: int, **kind: Any) -> bool:
    """Q from the decoder's S tokens, K and V from ``keys`` tokens; every call gets a position bias as its mask."""
    inner = T5_H * T5_d
    q = t.linear(f"{name}.q", x, B * queries, T5_D, inner)
    k = t.linear(f"{name}.k", memory, B * keys, T5_D, inner)
    v = t.linear(f"{name}.v", memory, B * keys, T5_D, inner)
    y = t.attend(name, (q, k, v), batch=B, heads=T5_H, queries=queries, keys=keys, width=T5_d, **kind)
    return t.linear(f"{name}.o", y, B * queries, inner, T5_D)


def _t5_block(t: Tally, block: str, x: bool, memory: bool | None, S: int, S_memory: int) -> bool:
    stack = block.partition(".")[0]
    has_bias = t.setup.is_trained(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias")
    is_decoder = memory is not None
    y = t.parameters(f"{block}.layer.0.layer_norm", x)
    x |= _t5_attention(
        t, f"{block}.layer.0.SelfAttention", y, y, S, S,
        is_causal=is_decoder, mask="trained" if has_bias else "constant",
    )  # fmt: skip
    if memory is not None:
        y = t.parameters(f"{block}.layer.1.layer_norm", x)
        # The cross attention's bias is zeros; with checkpointing transformers lets it ask for a gradient.
        mask = "trained" if t.setup.checkpointing != "none" else "constant"
        x |= _t5_attention(t, f"{block}.layer.1.EncDecAttention", y, memory, S, S_memory, mask=mask)
    feed_forward = f"{block}.layer.{2 if is_decoder else 1}"
    y = t.parameters(f"{feed_forward}.layer_norm", x)
    y = t.linear(f"{feed_forward}.DenseReluDense.wi", y, B * S, T5_D, T5_F)
    return x | t.linear(f"{feed_forward}.DenseReluDense.wo", y, B * S, T5_F, T5_D)


def t5(t: Tally, S: int) -> None:
    """An encoder of S tokens, a decoder of S / 2, cross attention between them; the head is tied to the embedding."""
    S_decoder = S // 2
    memory = t.embedding("shared")
    for i in range(LAYERS):
        with t.checkpointed(ends_with_product=True):
            memory = t.without_backward(_t5_block(t, f"encoder.block.{i}", memory, None, S, 0))
    memory = t.parameters("encoder.final_layer_norm", memory)
    x = t.embedding("shared")
    for i in range(LAYERS):
        with t.checkpointed(ends_with_product=True):
            x = t.without_backward(_t5_block(t, f"decoder.block.{i}", x, memory, S_decoder, S))
    x = t.parameters("decoder.final_layer_norm", x)
    t.linear("lm_head", x, B * S_decoder, T5_D, V, weight="shared")


# --- Mamba -----------------------------------------------------------------------------------------------------------

MAMBA_D, MAMBA_N, MAMBA_EXPAND, MAMBA_RANK, MAMBA_TAPS = 32, 4, 2, 2, 4


def build_mamba(S: int, attention: str) -> tuple[Any, Mapping[str, Any]]:
    config = hf.MambaConfig(
        hidden_size=MAMBA_D, num_hidden_layers=LAYERS, vocab_size=V, state_size=MAMBA_N, expand=MAMBA_EXPAND,
        time_step_rank=MAMBA_RANK, conv_kernel=MAMBA_TAPS, use_mambapy=False, use_cache=False, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return hf.MambaForCausalLM(config), _language_model(S)


def mamba(t: Tally, S: int) -> None:
    """A block, with I = expand D: in, depthwise convolution, x (makes dt, B and C), dt, the read-out C h, out.

    The scan itself (h = A h + B x) is elementwise and counts nothing. The depthwise convolution is padded by taps - 1
    on both sides and cut to S, so it computes S + taps - 1 positions.
    """
    T, D, I, N = B * S, MAMBA_D, MAMBA_EXPAND * MAMBA_D, MAMBA_N  # noqa: E741
    x = t.embedding("backbone.embeddings")
    for i in range(LAYERS):
        mixer = f"backbone.layers.{i}.mixer"
        trained = t.setup.is_trained(mixer)
        with t.checkpointed(ends_with_product=True):
            y = t.parameters(f"backbone.layers.{i}.norm", x)
            y = t.linear(f"{mixer}.in_proj", y, T, D, 2 * I)
            y = t.product(mixer, 2 * B * (S + MAMBA_TAPS - 1) * I * MAMBA_TAPS, y, trained)
            y = t.linear(f"{mixer}.x_proj", y, T, I, MAMBA_RANK + 2 * N)
            dt = t.product(mixer, 2 * T * MAMBA_RANK * I, y, trained)
            states = y or dt or trained
            y = t.product(mixer, 2 * T * I * N, states, y)
            x |= t.linear(f"{mixer}.out_proj", y, T, I, D)
            t.without_backward(x)
    x = t.parameters("backbone.norm_f", x)
    t.linear("lm_head", x, T, D, V, weight="backbone.embeddings")


TEXT_MODELS: tuple[ModelCase, ...] = (
    ModelCase(
        id="gpt2",
        build=build_gpt2,
        closed_form=gpt2,
        frozen_bottom=("transformer.wte", "transformer.wpe", "transformer.h.0"),
        frozen_top=("transformer.h.1",),
        lora_targets=("c_attn",),
    ),
    ModelCase(
        id="llama",
        build=build_llama,
        closed_form=llama,
        frozen_bottom=("model.embed_tokens", "model.layers.0"),
        frozen_top=("model.layers.1",),
        lora_targets=("q_proj", "v_proj"),
    ),
    ModelCase(
        id="mixtral",
        build=build_mixtral,
        closed_form=mixtral,
        frozen_bottom=("model.embed_tokens", "model.layers.0"),
        frozen_top=("model.layers.1",),
        lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
    ModelCase(
        id="bert",
        build=build_bert,
        closed_form=bert,
        frozen_bottom=("bert.embeddings", "bert.encoder.layer.0"),
        frozen_top=("bert.encoder.layer.1",),
        lora_targets=("query", "value"),
    ),
    ModelCase(
        id="t5",
        build=build_t5,
        closed_form=t5,
        frozen_bottom=("shared", "encoder", "decoder.block.0"),
        frozen_top=("encoder.block.1", "decoder.block.1"),
        lora_targets=("q", "v"),
    ),
    ModelCase(
        id="mamba",
        build=build_mamba,
        closed_form=mamba,
        frozen_bottom=("backbone.embeddings", "backbone.layers.0"),
        frozen_top=("backbone.layers.1",),
        lora_targets=("in_proj",),
        S=4,
        has_eager_attention=False,
    ),
)
