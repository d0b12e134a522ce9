"""Small models that are compiled, one for each kind of layer, and an independent count of the graphs made of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

__all__ = ["COMPILED", "CompiledCase", "GraphWalk"]

B, S, D, H, V = 2, 16, 32, 4, 64


@dataclass(frozen=True, kw_only=True)
class CompiledCase:
    """A model that is compiled, and how."""

    id: str
    build: Callable[[], tuple[Any, tuple[torch.Tensor, ...]]]
    """Model and inputs; the model gives its loss."""
    dynamic: bool | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around every run: a kernel choice."""
    is_training: bool = True
    has_same_modules: bool = True
    """Whether a product's module can be told from its operands as it is told from the call in eager."""
    is_slow: bool = False
    flex_blocks: int = 0
    """Listed blocks of 128 x 128 pairs, over batch and heads, of a flex attention."""


# --- models ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Norm, attention, norm, gated feed-forward; fewer heads for K and V than for Q."""

    def __init__(self, heads: int = H, kv_heads: int = 2, hidden: int = 48) -> None:
        super().__init__()
        self.d, self.heads, self.kv_heads = D // heads, heads, kv_heads
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.q, self.o = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.k, self.v = nn.Linear(D, kv_heads * self.d, bias=False), nn.Linear(D, kv_heads * self.d, bias=False)
        self.gate, self.up, self.down = nn.Linear(D, hidden), nn.Linear(D, hidden), nn.Linear(hidden, D)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.d)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LanguageModel(nn.Module):
    """Embedding, blocks, and a head whose weight is the embedding's; gives the cross entropy."""

    def __init__(self, *blocks: nn.Module, recompute: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks, self.norm = nn.Embedding(V, D), nn.ModuleList(blocks), nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.roll(-1, 1).flatten())


class MaskedBlock(Block):
    """The causal mask as a tensor."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class FlexModel(nn.Module):
    """Flex attention under a causal block mask; its backward does not exist on a CPU, so this one is not trained."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cpu")

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
        return self.out(flex_attention(q, k, v, block_mask=self.mask).transpose(1, 2).flatten(2)).mean()


class MixtureOfExperts(nn.Module):
    """Two of four experts for each token, run as one batched product over the pairs of token and expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, D, 48) / 8), nn.Parameter(torch.randn(4, 48, D) / 8)
        self.head = nn.Linear(D, V)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        tokens = x.flatten(0, 1)
        weights, experts = self.router(tokens).softmax(-1).topk(2)
        rows = tokens.repeat_interleave(2, 0).unsqueeze(1)
        hidden = F.gelu(torch.bmm(rows, self.up[experts.flatten()]))
        out = torch.bmm(hidden, self.down[experts.flatten()]).squeeze(1) * weights.flatten()[:, None]
        return F.cross_entropy(self.head(out.unflatten(0, (-1, 2)).sum(1)), labels)


class ConvNet(nn.Module):
    """Dense, depthwise, grouped, dilated and transposed convolutions, with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=2, dilation=2, groups=4),
            nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(8, 10)

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> Any:
        return F.cross_entropy(self.head(self.features(image).mean((2, 3))), labels)


class LowRank(nn.Module):
    """A frozen layer with an adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.b(self.a(x))


class EncoderDecoder(nn.Module):
    """torch's own transformer; its layers drop nothing out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.body = nn.Transformer(D, H, 1, 1, 48, dropout=0.0, batch_first=True)
        self.head = nn.Linear(D, V)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        y = self.body(self.embed(source), self.embed(target), tgt_is_causal=False)
        return F.cross_entropy(self.head(y).flatten(0, 1), target.flatten())


class Recurrent(nn.Module):
    """An LSTM between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.lstm, self.head = nn.Linear(D, D), nn.LSTM(D, 24, batch_first=True), nn.Linear(24, V)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return F.cross_entropy(self.head(self.lstm(self.into(x).relu())[0]).flatten(0, 1), labels)


class WithGraphBreak(nn.Module):
    """Two linears with a graph break between them, and a read-out of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.value = nn.Linear(D, 48), nn.Linear(48, D), nn.Linear(D, 1)

    def forward(self, x: torch.Tensor) -> Any:
        y = F.gelu(self.first(x))
        torch._dynamo.graph_break()
        return self.value(self.second(y).relu()).square().mean()


def _ids() -> torch.Tensor:
    return torch.randint(0, V, (B, S))


def _adapted() -> Any:
    model = LanguageModel(Block()).requires_grad_(False)
    block: Any = model.blocks[0]
    block.q, block.v = LowRank(block.q), LowRank(block.v)
    return model


def _half_frozen() -> Any:
    model = LanguageModel(Block(), Block())
    for part in (model.embed, model.blocks[0]):
        part.requires_grad_(False)
    return model


def _tokens_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(B, S, D), torch.randint(0, V, (B * S,))


COMPILED: tuple[CompiledCase, ...] = (
    CompiledCase(id="attention", build=lambda: (LanguageModel(Block()), (_ids(),))),
    CompiledCase(
        id="attention-math",
        build=lambda: (LanguageModel(Block()), (_ids(),)),
        context=lambda: sdpa_kernel(SDPBackend.MATH),
    ),
    CompiledCase(id="attention-mask", build=lambda: (LanguageModel(MaskedBlock()), (_ids(),))),
    CompiledCase(
        id="attention-flex",
        build=lambda: (FlexModel(256), (torch.randn(1, 256, D),)),
        is_training=False,
        flex_blocks=2 * 3,  # 2 heads, 3 of 2 x 2 blocks
    ),
    CompiledCase(id="dynamic-shapes", build=lambda: (LanguageModel(Block()), (_ids(),)), dynamic=True),
    CompiledCase(
        id="experts",
        build=lambda: (MixtureOfExperts(), _tokens_and_labels()),
    ),
    CompiledCase(id="convolutions", build=lambda: (ConvNet(), (torch.randn(B, 3, 16, 16), torch.randint(0, 10, (B,))))),
    CompiledCase(id="lora", build=lambda: (_adapted(), (_ids(),))),
    CompiledCase(id="half-frozen", build=lambda: (_half_frozen(), (_ids(),))),
    CompiledCase(id="checkpointing", build=lambda: (LanguageModel(Block(), recompute=True), (_ids(),))),
    CompiledCase(
        id="encoder-decoder",
        build=lambda: (EncoderDecoder(), (_ids(), _ids()[:, :8])),
        is_slow=True,
        has_same_modules=False,  # in eager nn.MultiheadAttention multiplies by its out_proj's weight itself
    ),
    CompiledCase(
        id="lstm",
        build=lambda: (Recurrent(), (torch.randn(B, 4, D), torch.randint(0, V, (B * 4,)))),
        context=lambda: torch._dynamo.config.patch(allow_rnn=True),  # by default dynamo leaves recurrent layers alone
        has_same_modules=False,
    ),
    CompiledCase(id="graph-break-dynamic", build=lambda: (WithGraphBreak(), (torch.randn(B, S, D),)), dynamic=True),
)


# --- an independent count of the final graphs ------------------------------------------------------------------------


def _shape(node: Any) -> list[int]:
    """Sizes of a node's tensor; symbolic ones by the sizes they were traced with."""
    return [size if isinstance(size, int) else int(size.node.hint) for size in node.meta["val"].shape]


def _matmul(a: Any, b: Any) -> int:
    return 2 * math.prod(_shape(a)) * _shape(b)[-1]


def _convolution(output: list[int], weight: Any) -> int:
    return 2 * math.prod(output) * math.prod(_shape(weight)[1:])


def _sdpa(q: Any, k: Any, args: tuple[Any, ...], products: int, causal_at: int) -> int:
    (batch, heads, queries, width), keys = _shape(q), _shape(k)[2]
    is_causal = args[causal_at] if len(args) > causal_at else False
    pairs = queries * (queries + 1) // 2 if is_causal else queries * keys
    return products * 2 * batch * heads * int(pairs) * width


def _executed(node: Any) -> int | None:
    """FLOPs that a node of a compiled graph executes; None for what is no product."""
    args: tuple[Any, ...] = node.args
    name = str(node.target)
    if name.startswith(("run_and_save_rng_state", "run_with_rng_state")):
        skip = 0 if name.startswith("run_and_save") else 1
        name, args = str(args[skip]), args[skip + 1 :]
    match name:
        case "aten.mm.default" | "aten.bmm.default":
            return _matmul(args[0], args[1])
        case "aten.addmm.default" | "aten.baddbmm.default":
            return _matmul(args[1], args[2])
        case "aten.convolution.default":
            x, weight, is_transposed = args[0], args[1], args[6]
            return _convolution(_shape(x) if is_transposed else _shape(node), weight)
        case "aten.convolution_backward.default":
            gradient, x, weight, is_transposed, wanted = args[0], args[1], args[2], args[7], args[10]
            return int(sum(wanted[:2])) * _convolution(_shape(x) if is_transposed else _shape(gradient), weight)
        case "aten._scaled_dot_product_flash_attention_for_cpu.default":
            return _sdpa(args[0], args[1], args, products=2, causal_at=4)
        case "aten._scaled_dot_product_flash_attention_for_cpu_backward.default":
            return _sdpa(args[1], args[2], args, products=5, causal_at=7)
        case "aten.mul.Tensor":
            return _outer_product(args)
    return None


def _outer_product(args: tuple[Any, ...]) -> int | None:
    """A product over K = 1, which inductor writes as a multiplication of (M, 1) with (1, N)."""
    if not all(isinstance(a, torch.fx.Node) for a in args):
        return None
    left, right = (_shape(a) for a in args)
    if len(left) == len(right) in (2, 3) and left[-1] == right[-2] == 1 and left[-2] > 1 < right[-1]:
        return 2 * math.prod(left) * right[-1]
    return None


class GraphWalk(CustomGraphPass):
    """Sums the products of every graph that inductor makes code for, from the nodes' own shapes."""

    def __init__(self, case: CompiledCase) -> None:
        self._flex = 2 * 2 * case.flex_blocks * 128 * 128 * (D // 2)
        self.flops = 0
        self.graphs = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs += 1
        for node in graph.nodes:
            if node.op == "call_function":
                self.flops += self._flex if str(node.target) == "flex_attention" else _executed(node) or 0

    def uuid(self) -> Any:
        """None: graphs that this pass saw are kept out of the on-disk cache."""
        return None
