"""Description: the settings of a model as texts, and readers that show whether anything in them was changed.

A text is the same in every process that has the same setting. Code is known by its name where it is installed. What has
no such text, as a function of a script, is known by its identity, and its text holds for this process alone.
"""

from __future__ import annotations

import functools
import re
import sys
import sysconfig
import types
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from enum import Enum
from operator import itemgetter
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import xxhash
from huggingface_hub.constants import HF_HUB_CACHE
from torch.nn.modules import module as torch_module
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils.hub import HF_MODULES_CACHE

from .weights import tensor_text

_BEGIN = object()
"""Comes before what is read of one object, so that a value that moves to the next object is seen."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_PARTS = ("_parameters", "_buffers", "_modules", *_HOOKS)
_IDLE = frozenset(vars(torch.nn.Module())) - {"training", *_PARTS}
"""What every module has and no forward pass depends on, such as hooks on gradients and on state dicts."""

_GENERATE = "generate"
"""Calls forward and is not called by it; open sessions put a guard in its place."""

_IRRELEVANT = frozenset(
    (
        _GENERATE,
        *("_compiled_call", "_is_hf_initialized", "_last_compile_config", "_output_capturing_hooks_installed"),
        *("base_model_name_or_path", "generation_config", "hf_device_map", "model_tags", "name_or_path"),
        "warnings_issued",
    )
)
"""Attributes that change no key or value."""

_REMEMBERED = "_cached_value"
"""End of the names under which transformers remembers, in a class, what it found out about it."""

_IRRELEVANT_IN_CONFIGURATIONS = frozenset(
    ("transformers_version", "use_cache", "architectures", "output_attentions", "output_hidden_states", "return_dict")
)
"""Fields of a configuration that change no key or value; so do all with an underscore, except implementations."""

_UNORDERED = "layer_types"
"""Attribute of modules that transformers makes of a set; the order of layers is in the configuration."""

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype})
_PLAIN_TOO = (
    *(int, float, complex, str, bytes, types.EllipsisType, range, slice, re.Pattern, PurePath, np.generic, np.dtype),
    *(torch.layout, torch.memory_format, torch._ops.OpOverload, torch._ops.OpOverloadPacket),
)
_NATIVE_CODE = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, np.ufunc)
_INSTALLED = (
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
    HF_HUB_CACHE,
    HF_MODULES_CACHE,
)
_OWN = __name__.partition(".")[0] + "."
_LONGEST_TEXT = 64

Reader = Callable[[Any], Sequence[Any]]


class _FieldsOfModel:
    """Attributes of the model itself, of which ``generate`` comes and goes with sessions."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __len__(self) -> int:
        return len(self._fields) - (_GENERATE in self._fields)


class Description:
    """All settings of a model, described once.

    Parameters
    ----------
    model
        The model.
    decoder
        The module of it that sessions set hooks on.
    identify
        Names an object by its identity.

    Attributes
    ----------
    texts
        By the name of a module and its attribute.
    private
        Names of those whose texts hold for this process alone.
    readers, views
        Functions and what each is called with, and containers. As long as what they return, and what is in them, are
        the same objects, the texts hold.
    empty
        Containers with nothing in them, such as those of most hooks; as long as they are empty, the texts hold.
    modules, sized
        Modules; their attributes, and what the views are of. As long as the modules are of the same classes, and these
        of the same lengths, the texts hold.
    weights
        The model's parameters and buffers.
    tensors
        Tensors elsewhere, whose texts hold as long as they are not written.
    training
        Name of a module that is in training mode, or None.
    """

    def __init__(self, model: Any, decoder: Any, identify: Callable[[Any], str]) -> None:
        self.texts: dict[str, str] = {}
        self.private: list[str] = []
        self.readers: defaultdict[Reader, list[Any]] = defaultdict(list)
        self.views: list[Iterable[Any]] = []
        self.empty: list[Collection[Any]] = []
        self.modules: list[torch.nn.Module] = []
        self.sized: list[Sized] = []
        self.weights: list[Iterable[torch.Tensor | None]] = []
        self.tensors: list[torch.Tensor] = []
        self.training: str | None = None
        self._identify = identify
        self._decoder = decoder
        self._name = ""
        self._known: dict[int, str] = {}
        self._held: list[Any] = []  # Two objects that are there at once have different ids.
        self._layouts: dict[tuple[str, ...], tuple[Reader, list[str]]] = {}
        modules = dict(model.named_modules())
        self._names = {id(module): name for name, module in modules.items()}
        for name, module in modules.items():
            self._module(name, module)
            self.weights += (module._parameters.values(), module._buffers.values())
            if module.training and self.training is None:
                self.training = name or type(module).__name__
        for kind in dict.fromkeys(base for module in self.modules for base in type(module).__mro__):
            if kind not in (object, torch.nn.Module):
                self._class(kind)
        for hooks in ("_global_forward_pre_hooks", "_global_forward_hooks"):
            self._hooks(f"torch.nn.{hooks}", getattr(torch_module, hooks), {})
        self._held.clear()
        self._known.clear()

    # Modules

    def _module(self, name: str, module: torch.nn.Module) -> None:
        """Describe the attributes of a module; its weights are hashed elsewhere."""
        fields = vars(module)
        if (layout := tuple(fields)) not in self._layouts:
            read = [field for field in fields if field not in _IDLE and field != _GENERATE]
            own = [field for field in read if field not in _PARTS and field not in _IRRELEVANT]
            self._layouts[layout] = itemgetter(*read), own
        getter, own = self._layouts[layout]
        self.readers[getter].append(fields)
        self.modules.append(module)
        self.sized.append(fields if name else _FieldsOfModel(fields))
        prefix = f"{name}." if name else ""
        self.texts[f"{prefix}__class__"] = _path(type(module))
        self._view(module._modules)
        for hooks in _HOOKS:
            self._hooks(prefix + hooks, fields[hooks], fields[f"{hooks}_with_kwargs"], module is self._decoder)
        for field in own:
            self._name, value = (path := prefix + field), fields[field]
            if field == _UNORDERED and isinstance(value, (list, tuple)):
                value = frozenset(value)
            if isinstance(value, types.MethodType) and value == _method(module, field):
                continue  # as after a replaced method was put back
            self.texts[path] = self._code(value) if field == "forward" else self._text(value)

    def _hooks(self, name: str, hooks: Mapping[int, Any], with_kwargs: Mapping[int, Any], ours: bool = False) -> None:
        if hooks or ours:
            self.readers[_hooks].append(hooks)
        else:
            self.empty.append(hooks)
        self._name = name
        texts = [
            f"{self._code(hook)}{' with kwargs' * (key in with_kwargs)}"
            for key, hook in hooks.items()
            if not _is_harmless(hook)
        ]
        if texts:
            self.texts[name] = str(texts)

    def _class(self, kind: type) -> None:
        """Describe what a class has that its own code does not say: methods put into it, and plain attributes."""
        self.readers[_values].append(kind)
        for field, value in vars(kind).items():
            self._name = path = f"{_path(kind)}.{field}"
            if field.startswith("__") or field.endswith(_REMEMBERED) or field in _IRRELEVANT:
                continue
            if isinstance(value, types.FunctionType):
                if (value.__module__, value.__qualname__) != (kind.__module__, f"{kind.__qualname__}.{field}"):
                    self.texts[path] = self._text(value)
            elif type(value) in _PLAIN or isinstance(value, (list, tuple, dict, set, torch.Tensor)):
                self.texts[path] = self._text(value)

    # Values

    def _text(self, value: Any) -> str:
        """Describe a value, and have everything in it read that may change."""
        if type(value) in _PLAIN:
            return repr(value)
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, Enum):
            return f"{_path(type(value))}.{value.name}"
        if isinstance(value, _PLAIN_TOO):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, type):
            return _path(value)
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, torch.device):
            return value.type
        self._held.append(value)
        self._known[id(value)] = "what it is part of"
        text = self._structure(value)
        if len(text) > _LONGEST_TEXT:
            text = xxhash.xxh3_128_hexdigest(text.encode())
        self._known[id(value)] = text
        return text

    def _structure(self, value: Any) -> str:
        if isinstance(value, torch.nn.Module):
            return self._submodule(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, Mapping):
            self._view(value)
            # In no order, as transformers makes some of them of sets.
            pairs = sorted(f"{self._text(key)}: {self._text(each)}" for key, each in value.items())
            return f"{type(value).__name__} {pairs}"
        if isinstance(value, (list, tuple, deque, set, frozenset)):
            if not isinstance(value, (tuple, frozenset)):
                self._view(value)
            texts = [self._text(each) for each in value]
            return f"{type(value).__name__} {sorted(texts) if isinstance(value, (set, frozenset)) else texts}"
        if isinstance(value, functools.partial):
            return f"partial of {[self._text(each) for each in (value.func, value.args, value.keywords)]}"
        if isinstance(value, types.MethodType):
            return f"{self._text(value.__func__)} of {self._text(value.__self__)}"
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, _NATIVE_CODE):
            owner = getattr(value, "__self__", None)
            of = "" if owner is None or isinstance(owner, types.ModuleType) else f" of {self._text(owner)}"
            return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', value.__name__)}{of}"
        if isinstance(value, (np.ndarray, bytearray)):
            self.readers[_bytes].append(value)
            return f"{type(value).__name__} {_bytes(value)}"
        return self._object(value)

    def _submodule(self, module: torch.nn.Module) -> str:
        """Name a module of the model; describe one that is only held by an attribute, with its weights."""
        if id(module) not in self._names:
            name = self._names[id(module)] = f"{self._name}/{len(self._names)}"
            self._module(name, module)
            for part in (module._parameters, module._buffers, module._modules):
                self._view(part)
                for field, value in part.items():
                    self._name = path = f"{name}.{field}"
                    self.texts[path] = self._text(value)
        return f"module {self._names[id(module)]!r}"

    def _tensor(self, tensor: torch.Tensor) -> str:
        self.tensors.append(tensor)
        try:
            return tensor_text(tensor)
        except (RuntimeError, NotImplementedError, TypeError):  # without bytes of its own, as on the meta device
            return self._unknown(tensor)

    def _code(self, value: Any) -> str:
        """Describe what is called in a forward pass."""
        text, code = self._text(value), value
        while isinstance(code, functools.partial):
            code = code.func
        known = isinstance(code, (types.MethodType, types.FunctionType, *_NATIVE_CODE)) or _is_installed(type(code))
        return text if known else f"{text} {self._unknown(value)}"

    def _function(self, function: types.FunctionType) -> str:
        original = getattr(function, "_torchdynamo_orig_callable", None)
        if original is not None:
            return f"compiled {self._text(original)}"
        name, installed = f"{function.__module__}.{function.__qualname__}", _is_installed(function)
        if installed and "<locals>" not in name:
            return name
        self.readers[_function_parts].append(function)
        parts = [self._text(part) for part in _function_parts(function)[1:]]
        return f"{name if installed else self._unknown(function)} {parts}"

    def _object(self, value: Any) -> str:
        kind = type(value)
        if kind.__module__.startswith((_OWN, "logging")):
            return _path(kind)
        fields = dict(_fields(value))
        if not fields and not hasattr(value, "__dict__"):
            return self._unknown(value)
        self.readers[_object_parts].append(value)
        texts = sorted(
            f"{field}={self._text(each)}" for field, each in fields.items() if not _is_irrelevant(value, field)
        )
        return f"{_path(kind)} {texts}"

    def _unknown(self, value: Any) -> str:
        self.private.append(self._name)
        return f"{_path(type(value))} {self._identify(value)}"

    def _view(self, container: Collection[Any]) -> None:
        if not container:
            self.empty.append(container)
        else:
            self.sized.append(container)
            self.views.append(container)
            if isinstance(container, Mapping):
                self.views.append(container.values())


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_harmless(hook: Any) -> bool:
    """Return whether a hook changes nothing that is computed: one of a session, or of transformers for its outputs."""
    home = getattr(hook, "__module__", None) or ""
    return home.startswith(_OWN) or home == "transformers.utils.output_capturing"


def _method(module: torch.nn.Module, name: str) -> Any:
    """Return the method that a module has of its class."""
    function = getattr(type(module), name, None)
    return types.MethodType(function, module) if isinstance(function, types.FunctionType) else None


def _is_installed(code: types.FunctionType | type) -> bool:
    if isinstance(code, types.FunctionType):
        return code.__code__.co_filename.startswith(_INSTALLED)
    home = sys.modules.get(code.__module__)
    return (getattr(home, "__file__", None) or "").startswith(_INSTALLED)


def _is_irrelevant(value: Any, field: str) -> bool:
    if not isinstance(value, PreTrainedConfig):
        return field in _IRRELEVANT
    hidden = field.startswith("_") and not field.endswith("_implementation_internal")
    return hidden or field in _IRRELEVANT_IN_CONFIGURATIONS


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, those in slots as well."""
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _named_globals(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named_globals(constant)


# Readers


def _values(target: Any) -> Sequence[Any]:
    return (_BEGIN, *vars(target).values())


def _hooks(target: Mapping[int, Any]) -> Sequence[Any]:
    return (_BEGIN, *(hook for hook in target.values() if not _is_harmless(hook)))


def _bytes(target: Any) -> Sequence[Any]:
    data = np.asarray(target)
    shown = f"{data.dtype} {data.shape} {xxhash.xxh3_128_hexdigest(data.tobytes())}"
    return (_BEGIN, sys.intern(shown))


def _object_parts(target: Any) -> Sequence[Any]:
    return (_BEGIN, *(each for field in _fields(target) for each in field))


def _function_parts(target: types.FunctionType) -> Sequence[Any]:
    """Return what a function's result may depend on: its closure, defaults, attributes and the globals it names."""
    cells = [cell.cell_contents if _is_filled(cell) else None for cell in target.__closure__ or ()]
    named = [] if _is_installed(target) else [target.__globals__.get(name) for name in _named_globals(target.__code__)]
    return (_BEGIN, *cells, target.__defaults__, target.__kwdefaults__, *vars(target).values(), *named)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
