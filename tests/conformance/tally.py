"""Arithmetic of a training step, written by hand: every product once, and which gradients the step asks for.

A closed form walks the dataflow of a model with sizes from its configuration and one boolean per activation: does a
gradient flow back through it? Nothing of torch is asked. One multiply-add is 2 FLOPs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Setup", "Tally"]

Checkpointing = Literal["none", "non_reentrant", "reentrant"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a model is trained."""

    frozen: tuple[str, ...] = ()
    """Names of modules whose parameters ask for no gradient."""
    lora_targets: tuple[str, ...] = ()
    """Last parts of the names of layers that get adapters; all other parameters are frozen then."""
    lora_rank: int = 2
    checkpointing: Checkpointing = "none"
    attention: Literal["sdpa", "eager"] = "sdpa"

    def is_trained(self, name: str) -> bool:
        """Whether parameters under this name ask for a gradient."""
        if self.lora_targets:
            return False
        return not any(name == prefix or name.startswith(prefix + ".") for prefix in self.frozen)

    def is_adapted(self, name: str) -> bool:
        """Whether the layer of this name has a LoRA adapter."""
        return name.rpartition(".")[2] in self.lora_targets


@dataclass
class Tally:
    """FLOPs of one step, added up product by product."""

    setup: Setup
    model: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Forward and backward, by the module that runs the product."""
    palm: int = 0
    """The same with every attention call as its full square."""
    attention: int = 0
    """The part of ``model`` that is attention."""
    palm_attention: int = 0
    diagonal: int = 0
    """Attention on the diagonals of causal squares."""
    recompute: int = 0
    kernel_recompute: int = 0
    """The fifth product of fused attention's backward."""
    masked: int = 0
    """Executed on masked pairs, or for gradients that nobody asked for: a fused kernel makes all of them."""
    _region: list[int] | None = None
    _executed: int = 0

    @property
    def model_flops(self) -> int:
        """What the mathematics of the step needs."""
        return sum(self.model.values())

    @property
    def hardware_flops(self) -> int:
        """What is executed."""
        return self.model_flops + self.recompute + self.kernel_recompute + self.masked

    # --- layers: each takes whether its input needs a gradient and says whether its output does ------------------

    def parameters(self, name: str, x: bool = False) -> bool:
        """An embedding, a norm, a bias: no product, but a gradient flows back to it."""
        return x or self.setup.is_trained(name)

    def embedding(self, name: str) -> bool:
        """An embedding. With checkpointing on, transformers makes its output ask for a gradient though it is frozen."""
        return self.setup.is_trained(name) or self.setup.checkpointing != "none"

    def linear(self, name: str, x: bool, tokens: int, I: int, O: int, *, weight: str | None = None) -> bool:  # noqa: E741
        """y = x W: T I O multiply-adds; backward one such product for dx and one for dW, if wanted."""
        return self._layer(name, x, tokens * I * O, tokens * I, tokens * O, weight or name)

    def conv(self, name: str, x: bool, *, positions: int, C_in: int, C_out: int, taps: int) -> bool:
        """Each of ``positions * C_out`` outputs sums over ``C_in`` channels (of its group) and all taps."""
        return self._layer(name, x, positions * C_out * C_in * taps, positions * C_in * taps, positions * C_out, name)

    def _layer(self, name: str, x: bool, macs: int, into_rank: int, out_of_rank: int, weight: str) -> bool:
        if not self.setup.is_adapted(name):
            return self.product(name, 2 * macs, x, self.setup.is_trained(weight))
        rank = self.setup.lora_rank
        self.product(f"{name}.base", 2 * macs, x, False)
        low = self.product(f"{name}.lora_a", 2 * into_rank * rank, x, True)
        return self.product(f"{name}.lora_b", 2 * rank * out_of_rank, low, True)

    def product(self, module: str, flops: int, *operands_need_gradient: bool) -> bool:
        """One product; its backward has one product of the same size for every operand that needs a gradient."""
        total = flops * (1 + sum(operands_need_gradient))
        self.model[module] += total
        self.palm += total
        self._ran(flops)
        return any(operands_need_gradient)

    def attend(
        self,
        module: str,
        needs_gradient: tuple[bool, bool, bool],
        *,
        heads: int,
        queries: int,
        keys: int,
        width: int,
        batch: int = 1,
        is_causal: bool = False,
        mask: Literal["none", "constant", "trained"] = "none",
    ) -> bool:
        """softmax(Q K^T) V: two products over the attended pairs; backward dQ, dK, dP and dV as far as they are wanted.

        Eager attention runs dense products. Fused attention skips what ``is_causal`` masks, runs what a tensor masks,
        makes all gradients and computes Q K^T once more in backward; with a mask that is trained it falls back to
        dense products.
        """
        q, k, v = needs_gradient
        dense = queries * keys
        attended = queries * (queries + 1) // 2 if is_causal else dense
        if self.setup.attention == "eager":
            attended = dense
        is_fused = self.setup.attention == "sdpa" and mask != "trained"
        unit = 2 * batch * heads * width  # FLOPs of one product per pair
        wanted = 2 + q + k + (q or k or mask == "trained") + v
        flops = unit * attended * wanted
        self.model[module] += flops
        self.attention += flops
        self.palm += unit * dense * wanted
        self.palm_attention += unit * dense * wanted
        self.diagonal += unit * queries * wanted * (attended < dense)
        executed_pairs = attended if is_fused and mask == "none" else dense
        needs_backward = q or k or v or mask == "trained"
        executed = 6 if is_fused and needs_backward else wanted
        self.masked += unit * (executed_pairs * executed - attended * wanted)
        self.kernel_recompute += unit * executed_pairs * (is_fused and needs_backward)
        self._ran(2 * unit * executed_pairs)
        return needs_backward

    # --- checkpointing -------------------------------------------------------------------------------------------

    def _ran(self, flops: int) -> None:
        if self._region is not None:
            self._region.append(flops)

    @contextmanager
    def checkpointed(self, *, ends_with_product: bool) -> Iterator[None]:
        """The layers inside run again in backward.

        Args:
            ends_with_product: nothing after the last product keeps a tensor for backward (a residual sum does not). A
                non-reentrant checkpoint stops as soon as it has all kept tensors, so that product is not run again; a
                reentrant one runs everything. A norm or a weighting after the last product keeps its input: then
                nothing is saved.

        Only for regions through whose output a gradient flows; see ``without_backward``.
        """
        self._region = []
        yield
        region, self._region = self._region, None
        if self.setup.checkpointing != "none" and not self._dropped:
            stops_early = ends_with_product and self.setup.checkpointing == "non_reentrant"
            self.recompute += sum(region[:-1] if stops_early else region)
        self._dropped = False

    _dropped: bool = False

    def without_backward(self, y: bool) -> bool:
        """Say inside a region whether a gradient flows through its output; without one nothing runs again."""
        self._dropped = not y
        return y
