"""Names of modules: what ``named_modules`` says, free of the prefixes that wrappers add."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

__all__ = ["ModuleNames", "clean_fqn"]

WRAPPER_PARTS = frozenset(
    {
        "_orig_mod",  # torch.compile
        "_fsdp_wrapped_module",  # FSDP
        "_checkpoint_wrapped_module",  # checkpoint_wrapper
        "_forward_module",  # Lightning Fabric, DeepSpeed strategies
        "_original_module",
    }
)
DATA_PARALLEL_CLASSES = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def clean_fqn(name: str) -> str:
    """A qualified name without the parts that wrappers put in: ``"_orig_mod.layers.0"`` -> ``"layers.0"``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS)


class ModuleNames:
    """Qualified names by module; a shared module keeps its first name.

    Args:
        root: the module whose name is ``""``. Without it the outermost module that runs lends its class name.
    """

    def __init__(self, root: nn.Module | None = None) -> None:
        self._names: dict[int, str] = {}
        self._alive: list[nn.Module] = []
        """Keeps ids valid for the life of the counter."""
        if root is not None:
            self._add_tree(root, "")

    def _add_tree(self, module: nn.Module, prefix: str) -> None:
        self._alive.append(module)
        for name, child in module.named_modules():
            self._names.setdefault(id(child), _join(prefix, _without_data_parallel(module, name)))

    def name_of(self, stack: Sequence[nn.Module]) -> str:
        """Name of the innermost module of a call stack (innermost first); ``""`` outside of any module."""
        if not stack:
            return ""
        known = self._names.get(id(stack[0]))
        if known is not None:
            return known
        if (wrapped := self._name_of_wrapped(stack[0])) is not None:
            return wrapped
        parent = self.name_of(stack[1:])
        self._add_tree(stack[0], _join(parent, type(stack[0]).__name__))
        return self._names[id(stack[0])]

    def _name_of_wrapped(self, wrapper: nn.Module) -> str | None:
        """A wrapper around a known module (compiled, data parallel) goes by the name of what it wraps."""
        for attribute in ("module", *WRAPPER_PARTS):
            inner = getattr(wrapper, attribute, None)
            if inner is not None and id(inner) in self._names:
                return self._names[id(inner)]
        return None


def _without_data_parallel(root: nn.Module, name: str) -> str:
    if type(root).__name__ in DATA_PARALLEL_CLASSES and (name == "module" or name.startswith("module.")):
        name = name[len("module.") :]
    return clean_fqn(name)


def _join(prefix: str, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)
