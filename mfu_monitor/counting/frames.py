"""Where an operator call came from, read off the Python stack: nothing is hooked, so there is nothing to leave behind.

A dispatch mode runs inside the call it observes, so the frames above it name the module whose ``forward`` is running,
the optimizer step, the checkpoint that recomputes. Hooks would show the same, but they stay in the user's model when a
step dies, and ``torch.compile`` guards on them.

The walk is taken at every operator. So what a frame's code says is found once, by the number of the code object (its
hash reads all its constants), and of a frame whose code says nothing no more is asked.
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from mfu_monitor.internals.autograd_state import running_pass
from mfu_monitor.internals.custom_forwards import ForwardCodes, code_of, context_of, functions_made, is_forward
from mfu_monitor.internals.facts import unguarded
from mfu_monitor.internals.stack import KnownCodes, is_compiled_wrapper, known_codes, pipeline_rehearsal

__all__ = ["CallSite", "StackReader", "is_called_from", "runs_inside"]


_FORWARDS = ForwardCodes()
_MANY_CODES = 20_000
"""Codes of notebooks and of compilers come and go; what is kept of them is read again now and then."""
_TORCH_DIRECTORY = str(Path(torch.__file__).parent)
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_COMMUNICATION_HOOKS = "ddp_comm_hooks"
_PIPELINE_STAGES = str(Path("pipelining") / "stage.py")
_TRANSFORMS = str(Path("_functorch") / "eager_transforms.py")


class CallSite:
    """The Python surroundings of one operator call, innermost first, up to the backward engine if one is running.

    Beyond that engine only two things are read: an optimizer's step, and a hook of an outer backward. The defaults are
    the class's, so that a site costs little.
    """

    checkpointed_at: int | None = None
    """How many of ``modules`` lie inside the innermost ``checkpoint(...)`` call; None outside any."""
    function_at: int | None = None
    """How many of ``modules`` lie inside the outermost ``Function.forward``; None outside any."""
    function_forwards: Sequence[FrameType] = ()
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
    in_compiled_call: bool = False
    """Inside a call of ``torch.compile``'s result; its operators show only while it runs in eager."""
    in_generated_code: bool = False
    """Inside code that inductor generated for a graph."""
    in_compiled_autograd: bool = False
    """Inside a backward that compiled autograd runs."""
    in_rehearsal: bool = False
    """A pipeline runs its stage to learn shapes, once before its first step."""
    backward: BackwardPass | None = None
    """The pass that runs; None outside of one, and where no thread shows its call."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        """Modules whose ``forward`` is on the stack."""

    def outside_checkpoint(self) -> list[nn.Module] | None:
        """Modules around the innermost checkpointed region or custom function; None outside of both."""
        cut = self.checkpointed_at if self.checkpointed_at is not None else self.function_at
        return None if cut is None else self.modules[cut:]

    @property
    def root_gradients(self) -> list[torch.Tensor]:
        """What the enclosing ``backward`` started with."""
        roots = () if self.backward is None else self.backward.roots
        return [root for reference in roots if (root := reference()) is not None]

    @property
    def differentiated(self) -> int:
        """How many tensors the enclosing ``backward`` started from; 0 where its call is not known."""
        return 0 if self.backward is None else self.backward.differentiated

    @property
    def create_graph(self) -> bool | None:
        """What the enclosing ``backward`` asked for; None where its call is not known."""
        return None if self.backward is None else self.backward.create_graph


@dataclass(slots=True)
class BackwardPass:
    """A backward pass: what it was called with, and what it was called from. All its operators share that."""

    number: int
    differentiated: int
    create_graph: bool | None
    roots: list[weakref.ref[torch.Tensor]]
    """The gradients it started with."""
    in_hook: bool = False
    in_optimizer_step: bool = False
    in_rehearsal: bool = False
    recompute: str | None = None


class StackReader:
    """Walks the stack above operators, for the length of one step."""

    def __init__(self) -> None:
        _FORWARDS.look_again()
        self._forwards: Mapping[CodeType, bool] = {}
        self._kinds: dict[int, _Kind] = {}
        self._made: str | None = None
        self._functions_made = unguarded(functions_made)
        self._pass_number = unguarded(running_pass)
        self._pass: BackwardPass | None = None
        self._held: tuple[FrameType, CallSite] | None = None
        """Of one of torch's optimizers, whose update runs a dozen operators a parameter: while its frame exists what
        it was called from stays the same. No other frame is held, for it would keep the user's activations alive."""

    def read(self, depth: int = 1, *, in_backward: bool) -> CallSite:
        """Walk the stack from ``depth`` frames above and say where the call came from.

        Args:
            depth: frames of ours to pass over.
            in_backward: whether a backward pass is running; the walk then ends at its engine.

        Returns:
            The call's surroundings; on a device's backward thread only what that thread runs.
        """
        start = sys._getframe(depth - 1).f_back  # None on a thread of the engine's that runs nothing but our own
        held = self._held
        if held is not None and held[0] is start and not in_backward:
            return held[1]
        self._renew()
        site, called = CallSite(), _CalledByEngine()
        kind_of, forwards = self._kinds.get, self._forwards
        frame = start
        while frame is not None:
            code = frame.f_code
            kind = kind_of(id(code)) or self._kind_of(code)
            if kind.is_users:
                called.is_users = True
            if kind.says_more:
                if kind.is_engine and in_backward:
                    break
                if kind.note is not None:
                    kind.note(site, frame, start, in_backward)
                if kind.is_forward and is_forward(frame, forwards):
                    site.function_forwards = [*site.function_forwards, frame]
                    site.function_at = len(site.modules)
                elif kind.is_transform:
                    site.in_transform = True
                site.in_rehearsal |= kind.is_rehearsal
                called.saw(kind)
            frame = frame.f_back
        if in_backward:
            site.in_hook = called.is_hook
            self._note_pass(site, frame, start)
        is_held = start is not None and not in_backward and self._kind_of(start.f_code).is_optimizers
        self._held = (start, site) if start is not None and is_held else None
        return site

    def release(self) -> None:
        """Hold no frame any more."""
        self._held = self._pass = None

    def graph_tangents(self, depth: int = 1) -> list[Any]:
        """The incoming gradients of a backward graph of AOT's on the stack: it takes them out of its arguments."""
        self._renew()
        frame: FrameType | None = sys._getframe(depth)
        while frame is not None and not self._kind_of(frame.f_code).is_engine:
            if frame.f_code.co_filename.startswith("<eval_with_key>"):
                found = [value for name, value in frame.f_locals.items() if name.startswith("tangents_")]
                if found:
                    return found
            frame = frame.f_back
        return []

    def _renew(self) -> None:
        """Know the custom functions that there are now."""
        made = self._functions_made()
        if made is None or made != self._made:
            self._made = made
            self._forwards = _FORWARDS.known()
            self._kinds = _kinds_for(self._forwards)

    def _kind_of(self, code: CodeType) -> _Kind:
        kind = self._kinds.get(id(code))
        if kind is None:
            kind = self._kinds[id(code)] = _Kind(code, known_codes(), self._forwards)
        return kind

    def _note_pass(self, site: CallSite, engine: FrameType | None, start: FrameType | None) -> None:
        number = self._pass_number()
        known = self._pass
        if known is None or known.number != number or number == -1:
            engine = engine or _blocked_engine()
            if engine is None:
                return
            known = self._pass = self._read_pass(number, engine, start)
        site.backward = known
        site.in_hook |= known.in_hook
        site.in_optimizer_step |= known.in_optimizer_step
        site.in_rehearsal |= known.in_rehearsal
        site.recompute = site.recompute or known.recompute

    def _read_pass(self, number: int, engine: FrameType, start: FrameType | None) -> BackwardPass:
        """Read what the running backward was called with and from: the frames stay while it runs."""
        # _engine_run_backward(outputs, gradients, retain_graph, create_graph, inputs, ...)
        given: tuple[Any, ...] = engine.f_locals.get("args", ())
        roots = [weakref.ref(t) for t in (given[0] if given else None) or () if isinstance(t, torch.Tensor)]
        found = BackwardPass(
            number=number,
            differentiated=len(engine.f_locals.get("t_outputs", ())),
            create_graph=bool(given[2]) if len(given) > 2 else None,
            roots=roots,
        )
        called, frame = _CalledByEngine(), engine.f_back
        while frame is not None:
            kind = self._kind_of(frame.f_code)
            found.in_rehearsal |= kind.is_rehearsal
            if kind.is_engine:
                found.in_hook |= called.is_hook
                called = _CalledByEngine()
            elif kind.is_optimizer_step:
                found.in_optimizer_step |= not _is_inside_closure(frame, start, engine)
            elif kind.is_checkpoint and called.is_users:
                # A backward pass of the user's own inside a region that runs again runs again too. A reentrant
                # checkpoint also starts one itself, for the gradients: no frame of the user's lies between.
                found.recompute = found.recompute or _recompute_of(frame.f_code)
            called.saw(kind)
            frame = frame.f_back
        return found


Note = Callable[[CallSite, FrameType, "FrameType | None", bool], None]


class _Kind:
    """What a frame of one code says of the call; found once a code.

    Args:
        code: kept, so that its number is given to no other.
        known: the codes of torch's.
        forwards: the codes of custom forwards.
    """

    __slots__ = (
        "code",
        "is_autograds",
        "is_checkpoint",
        "is_dispatch",
        "is_engine",
        "is_forward",
        "is_optimizer_step",
        "is_optimizers",
        "is_outer_module",
        "is_rehearsal",
        "is_transform",
        "is_users",
        "note",
        "says_more",
    )

    def __init__(self, code: CodeType, known: KnownCodes, forwards: Mapping[CodeType, bool]) -> None:
        name = code.co_filename
        is_autograds = code in known.custom_backward or name in (known.compiled_autograd_file, known.checkpoint_file)
        is_torchs = name.startswith((_TORCH_DIRECTORY, "<eval_with_key>")) and _COMMUNICATION_HOOKS not in name
        self.code = code
        self.note: Note | None = _note_for(code, known)
        """Writes it down: takes the site, the frame, the innermost frame, and whether a backward runs."""
        self.is_engine = code in known.engine
        self.is_transform = name.endswith(_TRANSFORMS)
        self.is_rehearsal = name.endswith(_PIPELINE_STAGES) and code in pipeline_rehearsal()
        self.is_forward = code in forwards
        """May be the forward of a custom function."""
        self.is_optimizer_step = code in known.optimizer_step
        self.is_optimizers = name.startswith(_OPTIMIZERS) and not code.co_flags & _SUSPENDS
        self.is_outer_module = code in known.outer_module_call
        self.is_checkpoint = name == known.checkpoint_file and code not in known.checkpoint_entry
        self.is_dispatch = code.co_name == "__torch_dispatch__"
        """Carries out an operator for a subclass or a mode."""
        self.is_autograds = is_autograds and not self.is_dispatch
        """A custom backward, a checkpoint, compiled autograd."""
        self.is_users = not (self.is_dispatch or is_autograds or is_torchs)
        self.says_more = (
            self.note is not None
            or self.is_engine
            or self.is_transform
            or self.is_rehearsal
            or self.is_forward
            or self.is_dispatch
            or self.is_autograds
        )
        """More than whose frame it is."""


_kinds: dict[int, _Kind] = {}
_kinds_are_of: tuple[KnownCodes, Mapping[CodeType, bool]] | None = None


def _kinds_for(forwards: Mapping[CodeType, bool]) -> dict[int, _Kind]:
    """By the number of the code; what was read by other codes than are known now is forgotten."""
    global _kinds, _kinds_are_of
    known = known_codes()
    is_same = _kinds_are_of is not None and _kinds_are_of[0] is known and _kinds_are_of[1] is forwards
    if not is_same or len(_kinds) > _MANY_CODES:
        _kinds, _kinds_are_of = {}, (known, forwards)
    return _kinds


def _note_for(code: CodeType, known: KnownCodes) -> Note | None:
    if code in known.module_call:
        return _add_module if code in known.outer_module_call else _add_inner_module
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


def _add_inner_module(site: CallSite, frame: FrameType, *_: Any) -> None:
    """The second of a call's two frames; the first, whose locals are quick to read, stands for both."""
    outer = None if frame.f_back is None else _kinds.get(id(frame.f_back.f_code))  # read already in most calls
    if outer is None or not outer.is_outer_module:
        _add_module(site, frame)


def _note_optimizer_step(site: CallSite, frame: FrameType, start: FrameType | None, _: bool) -> None:
    if not _is_inside_closure(frame, start):
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


def _note_checkpoint(site: CallSite, frame: FrameType, _: FrameType | None, in_backward: bool) -> None:
    code = frame.f_code
    if code in known_codes().checkpoint_entry:
        if site.checkpointed_at is None:
            site.checkpointed_at = len(site.modules)
    elif in_backward:
        site.recompute = site.recompute or _recompute_of(code)


def _recompute_of(code: CodeType) -> str | None:
    return {"recompute_fn": "non_reentrant", "backward": "reentrant"}.get(code.co_name)


def _blocked_engine() -> FrameType | None:
    """The engine's frame for a device's backward thread: the thread that called backward is blocked in it."""
    main = threading.main_thread().ident
    if threading.get_ident() == main:
        return None  # whose frames were walked
    is_enabled = gc.isenabled()
    try:
        gc.disable()  # Python up to 3.12 holds a lock meanwhile that what a collection ends may wait for
        frame = sys._current_frames().get(main or -1)
    finally:
        if is_enabled:
            gc.enable()
    engine = known_codes().engine
    while frame is not None and frame.f_code not in engine:
        frame = frame.f_back
    return frame


def _is_called_by_flex_attention(frame: FrameType) -> bool:
    """Called in eager, flex_attention wraps itself in ``torch.compile`` with the eager backend: nothing is compiled."""
    return frame.f_back is not None and frame.f_back.f_code.co_filename.endswith("flex_attention.py")


def _is_inside_closure(step: FrameType, start: FrameType | None, engine: FrameType | None = None) -> bool:
    """An optimizer's closure runs forward and backward inside ``step``; that is not optimizer work.

    Args:
        step: the frame of the optimizer's step.
        start: the innermost frame.
        engine: of the backward that runs, on whatever thread.
    """
    arguments = (*step.f_locals.get("args", ())[1:], *step.f_locals.get("kwargs", {}).values())
    given = [argument for argument in arguments if callable(argument)]
    if not given:
        return False
    inner = _codes_within(start, step) | _codes_within(engine, step)
    return any(code_of(argument) in inner for argument in given)


def _codes_within(frame: FrameType | None, outermost: FrameType) -> set[CodeType | None]:
    found: set[CodeType | None] = set()
    while frame is not None and frame is not outermost:
        found.add(frame.f_code)
        frame = frame.f_back
    return found
