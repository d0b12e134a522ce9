"""Tokens and samples of a batch, and its signature: from shapes alone, so that no device is asked or waited for."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import operator
from collections import UserDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch

from mfu_monitor.errors import ConfigurationError

__all__ = [
    "BatchCounts",
    "batch_counts",
    "batch_signature",
    "call_tokens_function",
    "find_masks",
    "has_tensors",
    "import_function",
    "resolve_tokens_function",
    "tensors_of",
]

IGNORED_LABEL = -100
"""The label that losses leave out: the default ``ignore_index`` of ``torch.nn.CrossEntropyLoss``."""

_MAX_DEPTH = 6
"""Nesting of a batch that is followed; deeper ones are cut, which also ends cycles."""
_MAX_LIST = 64
"""Lists longer than this hold samples, not fields; only their length is read."""
_LEAVES = (
    *(str, bytes, int, float, bool, complex, type(None), type),
    *(ModuleType, FunctionType, MethodType, BuiltinFunctionType),
)
_ARRAYS = ("numpy", "jax", "jaxlib", "cupy", "tensorflow")
_INTEGER_DTYPES = frozenset(
    {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCounts:
    """How much one training batch holds. None: not known from what may be read.

    Example:
        >>> batch_counts({"input_ids": torch.zeros(2, 8, dtype=torch.long)})
        BatchCounts(tokens=16, tokens_not_padding=None, tokens_in_loss=None, samples=2)
    """

    tokens: int | None = None
    """Tokens computed, padding included."""
    tokens_not_padding: int | None = None
    """Tokens where the attention mask is not 0."""
    tokens_in_loss: int | None = None
    """Labels other than -100."""
    samples: int | None = None


def batch_counts(batch: Any, *, read_contents: bool = True) -> BatchCounts:
    """Tokens and samples of a batch.

    ``input_ids`` (a key or an attribute) gives the tokens, else the batch's first tensor if it is integer of shape
    (B, T); any other batch has samples only, the first size of its first tensor.

    Args:
        batch: what the loader gave: a tensor, or mappings, sequences, dataclasses and objects of tensors.
        read_contents: also sum ``attention_mask`` and the labels, where they lie on the CPU. Contents of an
            accelerator's tensors are never read: that would wait for the device.
    """
    if _are_micro_batches(batch):
        return _sum([batch_counts(part, read_contents=read_contents) for part in batch])
    ids = _field(batch, "input_ids")
    if ids is None:
        ids = _integer_tokens(batch)
    if ids is None:
        return BatchCounts(tokens=_embedded_tokens(batch), samples=_samples(batch))
    tokens, samples = _tokens_and_samples(ids)
    mask, labels = find_masks(batch) if read_contents else (None, None)
    return BatchCounts(
        tokens=tokens,
        samples=samples,
        tokens_not_padding=_count_on_cpu(mask, 0),
        tokens_in_loss=_count_on_cpu(labels, IGNORED_LABEL),
    )


def _are_micro_batches(batch: Any) -> bool:
    """A list of batches: of mappings that each have tokens, or of tuples alike in number and dtypes of tensors."""
    if type(batch) is not list or not 2 <= len(batch) <= _MAX_LIST:
        return False
    if all(issubclass(type(part), Mapping) for part in batch):
        return all(_field(part, "input_ids") is not None for part in batch)
    kinds = {_tensor_kinds(part) for part in batch}
    return len(kinds) == 1 and None not in kinds


def _tensor_kinds(part: Any) -> tuple[torch.dtype, ...] | None:
    is_batch = isinstance(part, list | tuple) and part and all(isinstance(t, torch.Tensor) for t in part)
    return tuple([tensor.dtype for tensor in part]) if is_batch else None


def _sum(parts: list[BatchCounts]) -> BatchCounts:
    """None where one of them is not known."""
    sums = {}
    for name in (f.name for f in dataclasses.fields(BatchCounts)):
        values = [getattr(part, name) for part in parts]
        sums[name] = None if None in values else sum(values)
    return BatchCounts(**sums)


def find_masks(batch: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The attention mask and the labels of a batch, where each has the shape of ``input_ids``; else None."""
    ids = _field(batch, "input_ids")
    if ids is None or ids.is_nested:
        return None, None
    found = (_field(batch, "attention_mask"), _field(batch, "labels"))
    mask, labels = (t if t is not None and t.shape == ids.shape else None for t in found)
    return mask, labels


def _count_on_cpu(tensor: torch.Tensor | None, ignored: int) -> int | None:
    if tensor is None or tensor.device.type != "cpu":
        return None
    return int(torch.count_nonzero(tensor != ignored))


def _field(batch: Any, name: str) -> torch.Tensor | None:
    """A tensor of the batch by key or attribute; looks into a sequence's first element too: ``(inputs, labels)``."""
    kind = type(batch)
    if _is_tensor(batch) or issubclass(kind, _LEAVES):
        return None
    value = dict.get(batch, name) if issubclass(kind, dict) else _attributes(batch).get(name)
    if value is None and issubclass(kind, list | tuple):
        value = _item(batch, name)
        return value if _is_tensor(value) else None if value is None else _field(value, name)
    if value is None and issubclass(kind, UserDict):
        return _field(_attributes(batch).get("data"), name)
    return value if _is_tensor(value) else None


def _item(batch: Any, name: str) -> Any:
    """The item of this name of a named tuple; of another sequence its first item, where that may hold the name."""
    base, names = (list, ()) if issubclass(type(batch), list) else (tuple, getattr(type(batch), "_fields", ()))
    if name in names:
        return base.__getitem__(batch, names.index(name))
    first = base.__getitem__(batch, 0) if base.__len__(batch) else None
    return None if _is_tensor(first) else first


def _integer_tokens(batch: Any) -> torch.Tensor | None:
    # Only the first tensor decides: an integer matrix behind images or features is a target, not text.
    first = next(_tensors(batch), None)
    return first if first is not None and first.ndim == 2 and first.dtype in _INTEGER_DTYPES else None


def _embedded_tokens(batch: Any) -> int | None:
    embeds = _field(batch, "inputs_embeds")
    return embeds.shape[0] * embeds.shape[1] if embeds is not None and embeds.ndim == 3 else None


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in order."""
    return list(_tensors(batch))


def has_tensors(batch: Any) -> bool:
    """Whether the batch holds a tensor that its signature can name."""
    return next(_tensors(batch), None) is not None


def _tokens_and_samples(ids: torch.Tensor) -> tuple[int | None, int | None]:
    if ids.is_nested:
        values = _packed_values(ids)
        return (ids.numel() if values is None else int(values.shape[0])), int(ids.size(0))
    # A single row of packed documents has no sample axis.
    return ids.numel(), (int(ids.shape[0]) if ids.ndim > 1 else None)


def _packed_values(nested: torch.Tensor) -> torch.Tensor | None:
    """The jagged layout's packed values, whose shape the host knows; None for the strided layout (a method there)."""
    values = getattr(nested, "_values", None)
    return values if isinstance(values, torch.Tensor) else None


def _samples(batch: Any) -> int | None:
    first = next(_tensors(batch), None)
    if first is not None:
        return int(first.size(0)) if first.ndim else None
    base: Any = next((kind for kind in (list, tuple) if issubclass(type(batch), kind)), None)
    return None if base is None else base.__len__(batch) or None


def _tensors(batch: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if _is_tensor(batch):
        yield batch
    elif depth < _MAX_DEPTH:
        for _, part in _parts(batch):
            yield from _tensors(part, depth + 1)


def _is_tensor(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor)  # `isinstance` would ask the object for its class


def _parts(batch: Any) -> Iterable[tuple[Any, Any]]:
    """Keys and values that a container of any usual kind holds, in order; nothing for leaves.

    Nothing of the user's runs: no property, no ``__getitem__``, no ``__iter__``. They may load, draw or augment.
    """
    kind = type(batch)
    if issubclass(kind, dict):
        return list(dict.items(batch))
    if issubclass(kind, list | tuple):
        base: Any = list if issubclass(kind, list) else tuple
        items = base.__iter__(batch)
        return enumerate([next(items)] if base.__len__(batch) > _MAX_LIST else items)
    return () if issubclass(kind, _LEAVES) else list(_attributes(batch).items())


def _attributes(batch: Any) -> dict[str, Any]:
    """What an object keeps in its ``__dict__`` and its slots."""
    try:
        own = object.__getattribute__(batch, "__dict__")
    except AttributeError:
        own = {}
    found = dict(own) if type(own) is dict else {}
    for kind in type(batch).__mro__[:-1]:
        for name, slot in vars(kind).items():
            if type(slot) is MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # a slot that holds nothing
                    found[name] = slot.__get__(batch)
    return found


def batch_signature(batch: Any) -> Hashable:
    """Shapes, dtypes and need of gradient of every tensor of a batch, nested as they are; equal for equal work.

    Reads no contents and takes a few microseconds for a usual batch. Numbers and strings are left out: a running index
    in a batch must not make every step look new.

    Example:
        >>> batch_signature((torch.zeros(2, 8), None)) == batch_signature((torch.ones(2, 8), "text"))
        True
    """
    return _signature(batch, 0)


def _signature(batch: Any, depth: int) -> Hashable:
    kind = type(batch)
    if issubclass(kind, torch.Tensor):
        return _tensor_signature(batch)
    if kind in _LEAVES or depth >= _MAX_DEPTH:
        return None
    if issubclass(kind, list | tuple):
        base: Any = list if issubclass(kind, list) else tuple
        if base.__len__(batch) > _MAX_LIST:
            return base.__len__(batch)  # type: ignore[no-any-return]
        return tuple([_signature(value, depth + 1) for value in base.__iter__(batch)])
    if _is_array(kind):
        return (tuple(batch.shape), str(batch.dtype))
    return tuple([(_plain_key(key), _signature(value, depth + 1)) for key, value in _parts(batch)])


def _plain_key(key: Any) -> Hashable:
    """Keys of other types than these may compare and hash in ways of their own."""
    return key if type(key) in (str, int, type(None)) else type(key).__qualname__


def _is_array(kind: type) -> bool:
    """An array of a library whose shape and dtype are known to be plain to read."""
    return kind.__name__ in ("ndarray", "ArrayImpl", "EagerTensor") and kind.__module__.split(".")[0] in _ARRAYS


def _tensor_signature(tensor: torch.Tensor) -> Hashable:
    if tensor.is_nested:
        values = _packed_values(tensor)
        shape = tuple(values.shape) if values is not None else (tensor.dim(), tensor.numel())
        return ("nested", shape, tensor.dtype, tensor.requires_grad)
    return (tensor.shape, tensor.dtype, tensor.requires_grad)


def resolve_tokens_function(spec: str | Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """The function that ``tokens=`` names; None for the default.

    Raises:
        ConfigurationError: neither a callable nor the import path of one.
    """
    if spec is None or (callable(spec) and not isinstance(spec, str)):
        return spec
    if not isinstance(spec, str):
        raise ConfigurationError(_tokens_message(spec, f"it is {type(spec).__name__}"))
    try:
        return import_function(spec)
    except ImportError as error:
        raise ConfigurationError(_tokens_message(spec, str(error))) from error


def import_function(path: str) -> Callable[..., Any]:
    """The function or class at an import path.

    Args:
        path: ``"pkg.mod:function"``, ``"pkg.mod:Class.method"`` or ``"pkg.mod.function"``.

    Raises:
        ImportError: nothing can be imported there, or what is there cannot be called; says which.
    """
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not attribute:
        raise ImportError("it names no module")
    try:
        found = operator.attrgetter(attribute)(importlib.import_module(module_name))
    except (ImportError, AttributeError, ValueError) as error:
        raise ImportError(f"it cannot be imported: {error}") from error
    if not callable(found):
        raise ImportError(f"it is not callable: {path} is a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _tokens_message(spec: object, problem: str) -> str:
    return (
        f"tokens={spec!r} is not allowed: {problem}; expected a function of the batch that returns its number of "
        f"tokens, or its import path; example: tokens='my_project.data:count_tokens'"
    )


def call_tokens_function(function: Callable[[Any], Any], batch: Any) -> BatchCounts:
    """Call the user's function and check its answer: a whole number of tokens, or a ``BatchCounts``.

    Raises:
        TypeError: the answer is of another type, or a tensor on an accelerator (reading it would wait for the device).
        ValueError: the number is negative.
    """
    answer = function(batch)
    if isinstance(answer, BatchCounts):
        return answer
    name = getattr(function, "__qualname__", repr(function))
    if isinstance(answer, torch.Tensor) and answer.device.type != "cpu":
        raise TypeError(
            f"tokens function {name} returned a tensor on {answer.device}; reading it would make training wait for the "
            f"device. Return a Python int made from shapes"
        )
    try:
        tokens = None if isinstance(answer, bool) else operator.index(answer)
    except TypeError:
        tokens = None
    if tokens is None:
        raise TypeError(f"tokens function {name} returned {answer!r} ({type(answer).__name__}); expected an int")
    if tokens < 0:
        raise ValueError(f"tokens function {name} returned {tokens}; expected a number of tokens, 0 or more")
    return BatchCounts(tokens=tokens, samples=_samples(batch))
