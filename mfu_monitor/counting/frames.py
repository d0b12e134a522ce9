"""Where an operator call came from, read off the Python stack: nothing is hooked, so there is nothing to leave behind.

A dispatch mode runs inside the call it observes, so the frames above it name the module whose ``forward`` is running,
the optimizer step, the checkpoint that recomputes. Hooks would show the same, but they stay in the user's model when a
step dies, and ``torch.compile`` guards on them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from mfu_monitor.internals.custom_forwards import ForwardCodes, code_of, context_of, is_forward
from mfu_monitor.internals.stack import KnownCodes, is_compiled_wrapper, known_codes, pipeline_rehearsal

__all__ = ["CallSite", "graph_tangents", "is_called_from", "read_call_site", "runs_inside"]


_FORWARDS = ForwardCodes()
_MANY_CODES = 20_000
"""Codes of notebooks and of compilers come and go; what is kept of them is read again now and then."""
_TORCH_DIRECTORY = str(Path(torch.__file__).parent)
_COMMUNICATION_HOOKS = "ddp_comm_hooks"
_PIPELINE_STAGES = str(Path("pipelining") / "stage.py")
_TRANSFORMS = str(Path("_functorch") / "eager_transforms.py")


@dataclass(slots=True)
class CallSite:
    """The Python surroundings of one operator call, innermost first, up to the backward engine if one is running.

    Beyond that engine only two things are read: an optimizer's step, and a hook of an outer backward.
    """

    modules: list[nn.Module] = field(default_factory=list)
    """Modules whose ``forward`` is on the stack."""
    checkpointed_at: int | None = None
    """How many of ``modules`` lie inside the innermost ``checkpoint(...)`` call; None outside any."""
    function_at: int | None = None
    """How many of ``modules`` lie inside the outermost ``Function.forward``; None outside any."""
    function_forwards: list[FrameType] = field(default_factory=list)
    """Frames of ``torch.autograd.Function`` forwards, where grad mode is off whatever the user set."""
    recompute: str | None = None
    """``"reentrant"`` or ``"non_reentrant"`` where a checkpoint runs its function again."""
    in_custom_backward: bool = False
    incoming_gradients: tuple[Any, ...] = ()
    """What the innermost custom backward was called with."""
    in_optimizer_step: bool = False
    model_in_optimizer: bool = False
    """A module runs inside an optimizer's step, and not inside the closure that was given to it."""
    in_hook: bool = False
    """The engine called Python that is neither a custom backward nor a checkpoint: a hook, on whatever it hangs."""
    in_transform: bool = False
    """Inside a transform of ``torch.func``, whose tensors do not say whether they need gradients."""
    root_gradients: tuple[Any, ...] = ()
    """What the enclosing ``backward`` started with."""
    in_compiled_call: bool = False
    """Inside a call of ``torch.compile``'s result; its operators show only while it runs in eager."""
    in_generated_code: bool = False
    """Inside code that inductor generated for a graph."""
    in_compiled_autograd: bool = False
    """Inside a backward that compiled autograd runs."""
    differentiated: int = 0
    """How many tensors the enclosing ``backward`` started from; 0 where its frame is not on this thread."""
    in_rehearsal: bool = False
    """A pipeline runs its stage to learn shapes, once before its first step."""
    create_graph: bool | None = None
    """What the enclosing ``backward`` asked for; None where its frame is not on this thread."""

    def innermost(self, names: Callable[[nn.Module], str]) -> str | None:
        """Name of the innermost module, or None outside of any."""
        return names(self.modules[0]) if self.modules else None

    def outside_checkpoint(self) -> list[nn.Module] | None:
        """Modules around the innermost checkpointed region or custom function; None outside of both."""
        cut = self.checkpointed_at if self.checkpointed_at is not None else self.function_at
        return None if cut is None else self.modules[cut:]


def read_call_site(depth: int = 1, *, in_backward: bool) -> CallSite:
    """Walk the stack from ``depth`` frames above and say where the call came from.

    Args:
        depth: frames of ours to pass over.
        in_backward: whether a backward pass is running; the walk then ends at its engine.

    Returns:
        The call's surroundings; on a device's backward thread only what that thread runs.
    """
    site = CallSite()
    inner_codes: set[CodeType | None] = set()
    forwards = _FORWARDS.known()
    called = _CalledByEngine()
    engine: FrameType | None = None
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        kind = _kind_of(code)
        if kind.is_engine and in_backward:
            engine = frame
            break
        if kind.note is not None:
            kind.note(site, frame, inner_codes, in_backward)
        if code in forwards and is_forward(frame, forwards):
            site.function_forwards.append(frame)
            site.function_at = len(site.modules)
        elif kind.is_transform:
            site.in_transform = True
        site.in_rehearsal |= kind.is_rehearsal
        called.saw(kind)
        inner_codes.add(code)
        frame = frame.f_back
    if in_backward:
        site.in_hook = called.is_hook
        _note_engine(site, engine or _blocked_engine(), inner_codes)
    return site


Note = Callable[[CallSite, FrameType, "set[CodeType | None]", bool], None]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a frame of one code says of the call; found once a code."""

    note: Note | None
    """Writes it down: takes the site, the frame, the codes further in, and whether a backward runs."""
    is_engine: bool
    is_transform: bool
    is_dispatch: bool
    """Carries out an operator for a subclass or a mode."""
    is_rehearsal: bool
    is_autograds: bool
    """A custom backward, a checkpoint, compiled autograd."""
    is_users: bool


_kinds: dict[CodeType, _Kind] = {}
_kinds_are_of: KnownCodes | None = None


def _kind_of(code: CodeType) -> _Kind:
    global _kinds_are_of
    known = known_codes()
    if known is not _kinds_are_of or len(_kinds) > _MANY_CODES:
        _kinds.clear()
        _kinds_are_of = known
    kind = _kinds.get(code)
    if kind is None:
        kind = _kinds[code] = _read_kind(code, known)
    return kind


def _read_kind(code: CodeType, known: KnownCodes) -> _Kind:
    name = code.co_filename
    is_autograds = code in known.custom_backward or name in (known.compiled_autograd_file, known.checkpoint_file)
    is_dispatch = code.co_name == "__torch_dispatch__"
    is_torchs = name.startswith((_TORCH_DIRECTORY, "<eval_with_key>")) and _COMMUNICATION_HOOKS not in name
    return _Kind(
        note=_note_for(code, known),
        is_engine=code in known.engine,
        is_transform=name.endswith(_TRANSFORMS),
        is_dispatch=is_dispatch,
        is_rehearsal=name.endswith(_PIPELINE_STAGES) and code in pipeline_rehearsal(),
        is_autograds=is_autograds and not is_dispatch,
        is_users=not (is_dispatch or is_autograds or is_torchs),
    )


def _note_for(code: CodeType, known: KnownCodes) -> Note | None:
    if code in known.module_call:
        return _add_module
    if code in known.optimizer_step:
        return _note_optimizer_step
    if code in known.custom_backward:
        return _note_custom_backward
    if code.co_filename == known.compiled_autograd_file:
        return _note_compiled_autograd
    if code.co_filename == known.checkpoint_file:
        return _note_checkpoint
    if code.co_name == "call":
        return _note_generated_code
    return _note_compiled_call if code.co_name == known.compiled_call else None


class _CalledByEngine:
    """Whether the Python between a backward engine and an operator is a hook.

    The engine calls gradient products from C++. Frames of the user's below it are a hook of some kind (on a tensor, a
    module, an accumulated gradient, a saved tensor, a communication), unless a custom backward or a checkpoint called
    them. What runs inside a ``__torch_dispatch__`` is how an operator of a subclass or mode is carried out.
    """

    def __init__(self) -> None:
        self.is_users, self._is_of_autograd = False, False

    def saw(self, kind: _Kind) -> None:
        """One frame more, going outwards."""
        if kind.is_users:
            self.is_users = True
        elif kind.is_dispatch:
            self.is_users = False
        elif kind.is_autograds:
            self._is_of_autograd = True

    @property
    def is_hook(self) -> bool:
        """What was seen since the start is a hook's."""
        return self.is_users and not self._is_of_autograd


def _note_engine(site: CallSite, engine: FrameType | None, inner_codes: set[CodeType | None]) -> None:
    """Read what the running backward was called with, and what it was called from."""
    if engine is None:
        return
    site.create_graph = _asks_create_graph(engine)
    site.differentiated = len(engine.f_locals.get("t_outputs", ()))
    # _engine_run_backward(outputs, gradients, ...)
    site.root_gradients = tuple(engine.f_locals.get("args", ((),))[0] or ())
    called, frame = _CalledByEngine(), engine.f_back
    known = known_codes()
    while frame is not None:
        code = frame.f_code
        kind = _kind_of(code)
        site.in_rehearsal |= kind.is_rehearsal
        if kind.is_engine:
            site.in_hook |= called.is_hook
            called = _CalledByEngine()
        elif code in known.optimizer_step:
            site.in_optimizer_step |= not _is_inside_closure(frame, inner_codes)
        elif code.co_filename == known.checkpoint_file and code not in known.checkpoint_entry and called.is_users:
            # A backward pass of the user's own inside a region that runs again runs again too. A reentrant checkpoint
            # also starts one itself, for the gradients: no frame of the user's lies between.
            _note_checkpoint(site, frame, inner_codes, True)
        called.saw(kind)
        inner_codes.add(code)
        frame = frame.f_back


def graph_tangents(depth: int = 1) -> list[Any]:
    """The incoming gradients of a backward graph of AOT's that is on the stack: it takes them out of its arguments."""
    engine = known_codes().engine
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_code not in engine:
        if frame.f_code.co_filename.startswith("<eval_with_key>"):
            found = [value for name, value in frame.f_locals.items() if name.startswith("tangents_")]
            if found:
                return found
        frame = frame.f_back
    return []


def runs_inside(function: Any, *, depth: int = 1) -> bool:
    """True when a call of this Python function is on the stack."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        if frame.f_code is function.__code__:
            return True
        frame = frame.f_back
    return False


def is_called_from(file_name: str, *, depth: int = 1) -> bool:
    """True when a function of a file of this name is on the stack."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        if frame.f_code.co_filename.endswith(file_name):
            return True
        frame = frame.f_back
    return False


def _add_module(site: CallSite, frame: FrameType, *_: Any) -> None:
    module = frame.f_locals.get("self")
    if is_compiled_wrapper(module):
        return  # a graph that some compiler interprets, or compiled autograd's backward: no module of the user's
    if isinstance(module, nn.Module) and (not site.modules or site.modules[-1] is not module):
        site.modules.append(module)


def _note_optimizer_step(site: CallSite, frame: FrameType, inner_codes: set[CodeType | None], _: bool) -> None:
    if not _is_inside_closure(frame, inner_codes):
        site.in_optimizer_step = True
        site.model_in_optimizer |= bool(site.modules)


def _note_compiled_autograd(site: CallSite, *_: Any) -> None:
    site.in_compiled_autograd = True


def _note_generated_code(site: CallSite, frame: FrameType, *_: Any) -> None:
    site.in_generated_code |= "extern_kernels" in frame.f_globals


def _note_compiled_call(site: CallSite, frame: FrameType, *_: Any) -> None:
    site.in_compiled_call |= not _is_called_by_flex_attention(frame)


def _note_custom_backward(site: CallSite, frame: FrameType, *_: Any) -> None:
    # One decorator around both makes the backward's frame look like a forward's; its context says whose it is.
    own = frame.f_locals.get("self")
    site.function_forwards = [f for f in site.function_forwards if context_of(f) is not own]
    if not site.function_forwards:
        site.function_at = None
    if not site.in_custom_backward:
        site.incoming_gradients = frame.f_locals.get("args", ())
    site.in_custom_backward = True


def _note_checkpoint(site: CallSite, frame: FrameType, _: set[CodeType | None], in_backward: bool) -> None:
    code = frame.f_code
    if code in known_codes().checkpoint_entry:
        if site.checkpointed_at is None:
            site.checkpointed_at = len(site.modules)
    elif in_backward and code.co_name == "recompute_fn":
        site.recompute = site.recompute or "non_reentrant"
    elif in_backward and code.co_name == "backward":
        site.recompute = site.recompute or "reentrant"


def _asks_create_graph(engine: FrameType) -> bool | None:
    # _engine_run_backward(outputs, gradients, retain_graph, create_graph, inputs, ...)
    args = engine.f_locals.get("args", ())
    return bool(args[2]) if len(args) > 2 else None


def _blocked_engine() -> FrameType | None:
    """The engine's frame for a device's backward thread: the thread that called backward is blocked in it."""
    frame = sys._current_frames().get(threading.main_thread().ident or -1)
    engine = known_codes().engine
    while frame is not None and frame.f_code not in engine:
        frame = frame.f_back
    return frame


def _is_called_by_flex_attention(frame: FrameType) -> bool:
    """Called in eager, flex_attention wraps itself in ``torch.compile`` with the eager backend: nothing is compiled."""
    return frame.f_back is not None and frame.f_back.f_code.co_filename.endswith("flex_attention.py")


def _is_inside_closure(step: FrameType, inner_codes: set[CodeType | None]) -> bool:
    """An optimizer's closure runs forward and backward inside ``step``; that is not optimizer work."""
    arguments = (*step.f_locals.get("args", ())[1:], *step.f_locals.get("kwargs", {}).values())
    return any(code_of(argument) in inner_codes for argument in arguments if callable(argument))
