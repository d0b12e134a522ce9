"""Fingerprints of what products take, by which ranks tell work that several of them do from work that one does.

A fingerprint is an integer sum over the bits of a sample, at the same pseudo-random places on every rank. Two calls
with equal operands have equal fingerprints; others have equal ones only where all sampled elements agree, which in
activations of different data does not happen. A sample in which all elements are equal (gradients that are still zero)
proves nothing and is marked as flat.

Sampling reads a few hundred elements of each operand, queues small kernels where an accelerator holds them, and never
waits: the sums are read once they have arrived.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mfu_monitor.counting.late_reads import read_late
from mfu_monitor.counting.step_record import Phase
from mfu_monitor.errors import must_pass
from mfu_monitor.internals.dispatcher import without_dispatch_modes
from mfu_monitor.internals.tensors import is_fake

__all__ = ["NOT_SEEN", "SECTION_WORDS", "BatchPrint", "Marks", "Place", "Print", "StepPrints", "batch_print"]

SAMPLES = 256
"""Elements sampled of each operand. With nine rows in ten equal on two ranks all of them agree once in 5e11."""
SAMPLES_OF_BATCH = 4096
SECTION_WORDS = 512
"""Integers that a rank sends of its fingerprints beside one window's row, at most: 4 KB."""
NOT_SEEN = -1
"""In the place of a fingerprint: nothing shows what the calls took."""
_KEPT_PLACES = 512
_BITS = 2**64
_PLAIN = (torch.Tensor, nn.Parameter)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}

Place = tuple[str, Phase, str, str | None, tuple[tuple[int, ...], ...]]
"""Operator, phase, module, precision and shapes: one entry of a record."""


@dataclass(frozen=True, slots=True)
class Print:
    """Fingerprint of one call: of its first operand and of all others."""

    first: int
    rest: int
    is_flat: bool
    """Some operand's sample holds one value only."""


class _Places:
    """Where to sample and by what to multiply: fixed numbers, put on a device once."""

    def __init__(self) -> None:
        self._base: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._places: dict[tuple[torch.device, int, int], torch.Tensor] = {}

    def of(self, device: torch.device, numel: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat positions in a tensor of so many elements, and the factor of each."""
        base, factors = self._base.get(device) or self._make(device)
        key = (device, numel, most)
        places = self._places.get(key)
        if places is None:
            if len(self._places) >= _KEPT_PLACES:
                self._places.clear()
            places = torch.arange(numel, device=device) if numel <= most else base[:most] % numel
            self._places[key] = places
        return places, factors[: places.numel()]

    def _make(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        own = random.Random(0)  # its own generator: the global ones are the user's
        rows = [[own.getrandbits(62) for _ in range(SAMPLES_OF_BATCH)] for _ in range(2)]
        table = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        base, factors = table.to(device, non_blocking=True).unbind(0)
        self._base[device] = (base, factors * 2 + 1)
        return self._base[device]


_PLACES = _Places()


def _can_be_sampled(tensor: torch.Tensor) -> bool:
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_nested or is_fake(tensor):
        return False
    if tensor.device.type == "cuda":
        return not torch.cuda.is_current_stream_capturing()
    return tensor.device.type != "meta"


def _sample(tensor: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over a sample's bits, and whether all of its elements are equal; on the tensor's device."""
    places, factors = _PLACES.of(tensor.device, tensor.numel(), most)
    if tensor.is_contiguous():
        values = tensor.view(-1)[places]
    else:
        coordinates = []
        for size in reversed(tensor.shape):  # a copy of the whole tensor would be flat, and large
            coordinates.append(places % size)
            places = places // size
        values = tensor[tuple(reversed(coordinates))]
    bits = values.contiguous().view(_INTEGERS.get(values.element_size(), torch.int64)).to(torch.int64)
    if bits.numel() != factors.numel():  # complex128: two integers an element
        bits = bits.reshape(factors.numel(), -1).sum(-1)
    return (bits * factors).sum(), (bits == bits[0]).all().to(torch.int64)


class Marks:
    """Fingerprints of the products of one step.

    Example:
        >>> marks = Marks()
        >>> number = marks.mark([x, weight])
        >>> read = marks.settle()
        >>> read()[number].is_flat
        False
    """

    def __init__(self) -> None:
        self._rows: dict[torch.device, list[torch.Tensor]] = {}
        self._where: list[tuple[torch.device, int]] = []

    def mark(self, operands: Sequence[torch.Tensor]) -> int | None:
        """A product ran on these operands; the number of its fingerprint, None where it has none."""
        matrices = [t for t in operands if t.is_floating_point() or t.is_complex() or t.dtype is torch.int8]
        matrices = [t for t in matrices if t.dim() >= 2 and t.numel()] or [t for t in matrices if t.numel()]
        if not matrices or not all(map(_can_be_sampled, matrices)):
            return None
        try:
            return self._add(matrices)
        except Exception as error:  # a tensor that cannot be read this way: repeats of it stay unknown
            if must_pass(error):
                raise
            return None

    def _add(self, matrices: Sequence[torch.Tensor]) -> int:
        device = matrices[0].device
        with without_dispatch_modes(), torch.no_grad():
            sums, flats = zip(*(_sample(t, SAMPLES) for t in matrices), strict=True)
            rest = torch.zeros_like(sums[0])
            for position, total in enumerate(sums[1:], start=1):
                rest = rest + total * (2 * position + 1)
            row = torch.stack([sums[0], rest, torch.stack(flats).amax()])
        rows = self._rows.setdefault(device, [])
        rows.append(row)
        self._where.append((device, len(rows) - 1))
        return len(self._where) - 1

    def settle(self) -> Callable[[], list[Print] | None]:
        """The step has ended: a function that gives the fingerprints by number, or None while they have not come."""
        with without_dispatch_modes(), torch.no_grad():
            late = {device: read_late(torch.stack(rows)) for device, rows in self._rows.items()}
        where, self._rows, self._where = self._where, {}, []

        def read() -> list[Print] | None:
            if not all(has_come() for has_come, _ in late.values()):
                return None
            rows = {device: values.tolist() for device, (_, values) in late.items()}
            return [_print(*rows[device][row]) for device, row in where]

        return read


def _print(first: int, rest: int, is_flat: int) -> Print:
    return Print(first % _BITS, rest % _BITS, bool(is_flat))


@dataclass(frozen=True, slots=True)
class StepPrints:
    """What a counted step's products took, by entry of its record: the numbers of their fingerprints.

    Example:
        >>> prints = StepPrints({place: [0, 1]}, marks.settle())
        >>> prints.units()
    """

    calls: Mapping[Place, Sequence[int | None]]
    read: Callable[[], list[Print] | None]

    def units(self) -> dict[Place, tuple[int, int]] | None:
        """Two integers an entry, as they are sent; None while the fingerprints have not come."""
        prints = self.read()
        if prints is None:
            return None
        return {
            place: _words(place, [None if n is None else prints[n] for n in ns]) for place, ns in self.calls.items()
        }


def _words(place: Place, prints: Sequence[Print | None]) -> tuple[int, int]:
    op, phase, module, precision, shapes = place
    key = _hash(module, bits=16) << 15 | (phase is Phase.BACKWARD) << 14
    key |= _hash(op, precision, shapes, len(prints), bits=14)
    seen = [p for p in prints if p is not None]
    if len(seen) < len(prints):
        return key << 31, NOT_SEEN
    first, rest = (_mixed(sum(values)) for values in ((p.first for p in seen), (p.rest for p in seen)))
    return key << 31 | first, rest << 1 | any(p.is_flat for p in seen)


def _hash(*values: object, bits: int) -> int:
    # Not `hash`, which every process salts in its own way.
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ((1 << bits) - 1)


def _mixed(total: int) -> int:
    """31 bits of a sum."""
    return (total * 0x9E3779B97F4A7C15 % 2**64) >> 33


BatchPrint = Callable[[], Any]
"""Gives a batch's fingerprint, or None while it has not come."""


def batch_print(tensors: Iterable[torch.Tensor]) -> BatchPrint | None:
    """The fingerprint of a batch's tensors, read as it is now; None where there is none to be had."""
    given = [t for t in tensors if t.numel()]
    if not given or not all(map(_can_be_sampled, given)):
        return None
    with without_dispatch_modes(), torch.no_grad():
        late = [read_late(_sample(t, SAMPLES_OF_BATCH)[0]) for t in given]

    def read() -> int | None:
        if not all(has_come() for has_come, _ in late):
            return None
        return sum((2 * place + 1) * int(value) for place, (_, value) in enumerate(late)) % _BITS

    return read
