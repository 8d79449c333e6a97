"""`AutoQuantizationState`, which shows what a module has run, and the interception of module calls."""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch import nn

from intaglio.eager.intercepted_run import call_intercepted, current
from intaglio.eager.model_copies import Attachment, ids_prepared_separately
from intaglio.eager.recording.module_kinds import CONTAINERS, ModuleKind, kind_of
from intaglio.eager.recording.plain_objects import tensors_inside
from intaglio.eager.seen_operators import SeenOpInfo, SeenRecording
from intaglio.eager.session import Session
from intaglio.eager.state_dict_hooks import STATE_KEY, LoadHook, SaveHook
from intaglio.errors import CaptureError, InputError
from intaglio.ir import QParams
from intaglio.runtime import QuantizedModel
from intaglio.runtime.custom_op import refuse_call
from intaglio.torch_private import is_traced, load_state_dict_pre_hooks, state_dict_hooks, submodules_of


class AutoQuantizationState(nn.Module, Attachment):
    """Recorded operators and quantization parameters of one non-leaf module, stored as an attribute of it.

    It is a submodule of the module only if `prepare` was asked for it (`as_children`); iteration over modules does not
    find it otherwise. Its text lists what the module has run; tensors are numbered over the whole model.
    """

    def __init__(self, session: Session, path: str) -> None:
        super().__init__()
        self._session, self.path = session, path

    @property
    def session(self) -> Session:
        """Return the session that all modules of the model share, with its graphs built from the tensors of now."""
        if current.run is None:
            self._session.refresh()
        else:
            self._session.resume()
        return self._session

    def _seen(self) -> list[SeenRecording]:
        session, first, found = self.session, 0, []
        for segment in session.segments:
            found.append(SeenRecording(segment, first, session.model))
            first += len(segment.recording.types)
        return found

    @property
    def seen_op_infos(self) -> dict[int, SeenOpInfo]:
        """Return the operators that the module's code or its leaf modules run, in recording order."""
        return dict(enumerate(info for seen in self._seen() for info in seen.infos(self.path)))

    @property
    def tensor_id_to_observer(self) -> nn.ModuleDict:
        """Return the observers of a prepared model for tensors that the module's operators make or are the first to
        read.
        """
        found = {}
        for seen in self._seen():
            if seen.segment.prepared is not None and seen.segment.reference is None:
                observers, leaders = seen.segment.prepared.observers, seen.segment.prepared.annotations.leaders
                sites = seen.observed(self.path).items()
                found.update({str(n): observers[leaders[s.name]] for n, s in sites if leaders[s.name] in observers})
        return nn.ModuleDict(found)

    @property
    def tensor_id_to_qparams(self) -> dict[int, QParams]:
        """Return the quantization parameters of a converted model for the same tensors."""
        found = {}
        for seen in self._seen():
            if seen.segment.reference is not None:
                sites = seen.observed(self.path).items()
                found.update({number: seen.segment.reference.qparams[site.name] for number, site in sites})
        return found

    def __repr__(self) -> str:
        converted = not self.session.is_recording
        infos = [line for index, info in self.seen_op_infos.items() for line in info.lines(index, converted)]
        lines = ["(seen_op_infos): {", *[f"  {line}" for line in infos], "}"]
        if converted:
            known = self.tensor_id_to_qparams.items()
            lines += ["(tensor_id_to_qparams): {", *[f"  ({number}): {q}" for number, q in known], "}"]
        else:
            lines += f"(tensor_id_to_observer): {self.tensor_id_to_observer}".splitlines()
        return "\n".join(["AutoQuantizationState(", *[f"  {line}" for line in lines], ")"])


PLAIN_PYTHON = (
    "a prepared or converted model is plain Python, which torch.export, torch.compile and TorchScript cannot read"
)
MAKE_A_GRAPH = (
    "convert the model and make a graph of it: reference = eager.rewrite(converted); compile(reference) for speed, "
    "eager.scriptable(reference) for TorchScript, reference.as_module() for torch.export"
)


SYMBOLIC_SIZES = "a prepared or converted model is plain Python, which make_fx cannot record with symbolic sizes"


def refuse_tracing() -> None:
    """Raise `InputError` while torch.export or torch.compile traces a call."""
    if torch.compiler.is_exporting():
        refuse_call(PLAIN_PYTHON, MAKE_A_GRAPH)
    if torch.compiler.is_compiling():
        raise InputError("call", None, PLAIN_PYTHON, remedy=MAKE_A_GRAPH)


def refuse_symbolic_sizes(arguments: Any) -> None:
    """Raise `InputError` while make_fx traces a call with symbolic sizes."""
    if is_traced() and any(isinstance(size, torch.SymInt) for x in tensors_inside(arguments) for size in x.shape):
        raise InputError("call", None, SYMBOLIC_SIZES, remedy=MAKE_A_GRAPH)


class ScriptingRefusal(Attachment):
    """Attribute ``__prepare_scriptable__`` of a model, which `torch.jit.script` calls first."""

    def __call__(self) -> Any:
        """Raise `InputError`."""
        raise InputError("torch.jit.script", None, PLAIN_PYTHON, remedy=MAKE_A_GRAPH)


class InterceptedCall(Attachment):
    """Replacement for the forward of a non-leaf module."""

    def __init__(self, session: Session, module: nn.Module, path: str) -> None:
        self.session, self.module, self.path = session, module, path
        self.function = type(module).forward

    @property
    def __signature__(self) -> inspect.Signature:
        found = inspect.signature(self.function)
        return found.replace(parameters=list(found.parameters.values())[1:])

    @property
    def __code__(self) -> types.CodeType:
        """Return the code of the module's own forward, which `torch.export` reads."""
        return self.function.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward; a call from outside starts an intercepted run."""
        refuse_tracing()
        run = current.run
        if run is None or run.session is not self.session:
            refuse_symbolic_sizes((args, kwargs))
            return call_intercepted(self.session, self.path, self._forward, args, kwargs)
        outer = run.path
        run.path = self.path
        if run.tracks_modules:
            run.enter(self.path)
        try:
            return self.function(self.module, *args, **kwargs)
        finally:
            run.path = outer
            if run.tracks_modules:
                run.leave(self.path)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.module, *args, **kwargs)


class LeafCall(InterceptedCall):
    """Replacement for the forward of a module from `torch.nn`, which counts as one operator."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module as one operator; a call from outside starts an intercepted run."""
        run = current.run
        if run is None or run.session is not self.session:
            refuse_symbolic_sizes((args, kwargs))
            return call_intercepted(self.session, self.path, self, args, kwargs)
        return run.run_leaf(self.module, self.path, args, kwargs)


class OpaqueCall(InterceptedCall):
    """Replacement for the forward of a module that stays in float with everything inside it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward in float, without interception inside an intercepted run."""
        run = current.run
        if run is None or run.session is not self.session:
            return self._forward(*args, **kwargs)
        return run.run_opaque(self.path, self._reason(), self._forward, args, kwargs)

    def _reason(self) -> str:
        """Return why the module stays in float; empty for a compiled model, which does not."""
        if isinstance(self.module, QuantizedModel):
            return ""
        if isinstance(self.module, self.session.leaf_classes):
            return "its class is one of leaf_classes"
        return "its class overrides the forward of a class of torch.nn"


CALLS = {
    ModuleKind.INTERCEPTED: InterceptedCall,
    ModuleKind.OPERATOR: LeafCall,
    ModuleKind.OPAQUE: OpaqueCall,
}
"""Replacements for the forward of a module."""


def attach(session: Session, as_children: bool = False) -> None:
    """Intercept every module of the session's model, and install the state dictionary hooks.

    Args:
        session: Session of the model.
        as_children: Whether states are submodules. Containers keep theirs as attributes, because code that iterates
            over a container would take it for one of the layers.

    Raises:
        CaptureError: A module has an instance attribute named `forward`.
    """
    inside: set[int] = set()
    others = ids_prepared_separately(session.model)
    object.__setattr__(session.model, "__prepare_scriptable__", ScriptingRefusal())
    state_dict_hooks(session.model)[STATE_KEY] = SaveHook(session)
    for path, module in list(session.model.named_modules()):
        if id(module) in others:
            continue
        load_state_dict_pre_hooks(module)[STATE_KEY] = LoadHook(session, module is session.model)
        if id(module) in inside or isinstance(module, torch.jit.ScriptModule):  # code inside these is not intercepted
            continue
        if "forward" in vars(module):
            raise CaptureError(
                path or type(module).__name__,
                None,
                "this module has an instance attribute named forward, which replaces the method of its class",
                remedy="define forward in the class instead, or undo the wrapper that set the attribute",
            )
        kind = CALLS[kind_of(module, session.leaf_classes)] if path else InterceptedCall
        if kind is not InterceptedCall:
            inside.update(map(id, module.modules()))
        if kind is InterceptedCall or module is session.model:
            state = AutoQuantizationState(session, path).train(module.training)
            if as_children and not isinstance(module, CONTAINERS):
                submodules_of(module)[STATE_KEY] = state
            else:
                object.__setattr__(module, STATE_KEY, state)
        object.__setattr__(module, "forward", kind(session, module, path))


def has_states_as_children(model: nn.Module) -> bool:
    """Return whether `prepare` was asked to make the states of a model submodules."""
    return any(isinstance(module, AutoQuantizationState) for module in model.modules())


def session_of(model: nn.Module) -> Session:
    """Return the session that all modules of a prepared or converted model share.

    Raises:
        InputError: The model is not prepared.
    """
    state = getattr(model, "_auto_quant_state", None)
    if state is None:
        found = f"this {type(model).__name__} was not prepared"
        raise InputError("model", None, found, remedy="call eager.prepare(model, example_inputs) first")
    session: Session = state.session
    return session
