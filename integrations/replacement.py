"""Changing modules of other libraries in place: an instance is given a subclass of its own class, which has another forward pass.

Modules, parameters, their names and their memory stay as they are: nothing that reads or writes a model's state sees a difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Self

from torch import nn

from fastkron_py.runtime.checks import check_type
from fastkron_py.runtime.errors import type_name, value_error

_SHOWN: Final = 3  # reasons, or classes of modules, in an error
_PATCHED: Final = "already patched by use_fastkron"
_ADAPTERS: Final = ("peft.tuners.", "lycoris.modules.", "fastkron_py.nn.lokr")  # modules of their classes


class Replacement(nn.Module):
    """The base of forward passes that take the place of that of an instance's own class, which ``super().forward`` still calls.

    Attributes:
        PREFIX: of the names of the subclasses.
        ARGUMENT: that the model is, in errors.
        EXPECTED: the modules that can be changed, in an error.
        OPTIONS: names of the attributes that a module is given.
    """

    PREFIX: ClassVar[str]
    ARGUMENT: ClassVar[str] = "model"
    EXPECTED: ClassVar[str]
    OPTIONS: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def is_candidate(cls, module: Any) -> bool:
        """Whether a module is of a class that this is for."""
        raise NotImplementedError

    @classmethod
    def obstacle(cls, module: Any) -> str | None:
        """Why a candidate cannot be changed, or None."""
        raise NotImplementedError

    @classmethod
    def on_change(cls, module: Any) -> None:
        """Called with a module that has been changed, or changed back."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (type(self).__mro__[1], own_class(self)), self.__getstate__()  # type: ignore[no-untyped-call]


_classes: dict[tuple[type[Replacement], type[nn.Module]], type[Replacement]] = {}


def replacement_class(replacement: type[Replacement], own: type[nn.Module]) -> type[Replacement]:
    """The subclass of both that instances of a class are given."""
    if (replacement, own) not in _classes:
        attributes = {"__module__": replacement.__module__, "__doc__": replacement.__doc__}
        _classes[replacement, own] = type(f"{replacement.PREFIX}{own.__name__}", (replacement, own), attributes)
    return _classes[replacement, own]


def own_class(module: nn.Module) -> Any:
    """The class of a module, or the one that it had before it was changed."""
    classes = type(module).__mro__
    return classes[classes.index(Replacement) + 1] if Replacement in classes else classes[0]


def _blank(replacement: type[Replacement], own: type[nn.Module]) -> Any:
    """An object for a copy's, or a file's, state."""
    kind = replacement_class(replacement, own)
    return kind.__new__(kind)


class Applied:
    """Which modules of a model were changed. `close`, or the end of a ``with`` block, changes them back; ``print`` counts them by class.

    Attributes:
        replaced: names of the modules that compute with fastkron_py now.
        left_alone: names of the others, each with the reason.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        left_alone: Mapping[str, str],
        classes: Mapping[str, str],
    ) -> None:
        self._modules = dict(modules)
        self._classes = dict(classes)  # of all these modules
        self.replaced: tuple[str, ...] = tuple(modules)
        self.left_alone: Mapping[str, str] = dict(left_alone)

    def close(self) -> None:
        """Change the modules back; a second time has no effect."""
        for module in self._modules.values():
            _leave(module)
        self._modules.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.replaced)} replaced, {len(self.left_alone)} left alone)"

    def __str__(self) -> str:
        reasons = {name: f"left alone: {reason}" for name, reason in self.left_alone.items()}
        lines = Counter([f"{kind} {reasons.get(name, 'replaced')}" for name, kind in self._classes.items()])
        return "\n".join([repr(self), *[f"  {count} {line}" for line, count in lines.items()]])


def replace(model: Any, replacement: type[Replacement], *options: Any) -> Applied:
    """Change a model's modules; none if they were changed before.

    Args:
        model: to look through.
        replacement: their new forward pass.
        *options: values of the attributes that it names.

    Raises:
        TypeError: the model is no module.
        ValueError: no module can be changed: it says why.
    """
    found: dict[str, nn.Module] = {}
    left_alone: dict[str, str] = {}
    classes: dict[str, str] = {}
    for name, module in _modules(model, replacement.ARGUMENT):
        if replacement.is_candidate(module):
            classes[name] = type(module).__name__
            reason = _PATCHED if isinstance(module, Replacement) else replacement.obstacle(module)
            if reason is None:
                found[name] = module
            else:
                left_alone[name] = reason
    if not found and _PATCHED not in left_alone.values():
        raise value_error(replacement.ARGUMENT, replacement.EXPECTED, reasons(model, left_alone))
    for module in found.values():
        module.__dict__.update(zip(replacement.OPTIONS, options, strict=True))
        module.__class__ = replacement_class(replacement, type(module))
        replacement.on_change(module)
    return Applied(found, left_alone, classes)


def revert_fastkron(model: nn.Module) -> None:
    """Revert the changes by `use_fastkron`, also in a copy of the model or in one from a file, which have no `Applied`.

    Those of PEFT's, LyCORIS's and gated layers: the function is the same in each of these integrations.

    Args:
        model: the model, or a part of one; of LyCORIS the network.

    Raises:
        TypeError: no module.

    Example:
        >>> applied = use_fastkron(model)
        >>> revert_fastkron(copy.deepcopy(model))
    """
    for _, module in _modules(model, "model"):
        _leave(module)


def _leave(module: nn.Module) -> None:
    """Change a module back; without effect on one that was not changed."""
    if isinstance(module, Replacement):
        replacement: type[Replacement] = type(module).__mro__[1]
        module.__class__ = own_class(module)
        for name in replacement.OPTIONS:
            module.__dict__.pop(name, None)
        replacement.on_change(module)


def _modules(model: Any, argument: str) -> Iterator[tuple[str, nn.Module]]:
    """Every module of a model, with its name."""
    check_type(argument, model, nn.Module, "a torch.nn.Module")
    yield from model.named_modules()


def reasons(model: nn.Module, left_alone: Mapping[str, str]) -> str:
    """Why nothing in a model was changed, for an error."""
    if not left_alone:
        instead = _adapters(model)
        if instead:
            return f"{type_name(model)} with {', '.join(instead)}"
        kinds = list(dict.fromkeys(type(module).__name__ for module in model.modules()))
        others = f" and {len(kinds) - _SHOWN} other classes" if len(kinds) > _SHOWN else ""
        return f"{type_name(model)}, which has none among its modules ({', '.join(kinds[:_SHOWN])}{others})"
    shown = [f"{name or 'it'}: {reason}" for name, reason in left_alone.items()][:_SHOWN]
    more = len(left_alone) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


def _adapters(model: nn.Module) -> list[str]:
    """The adapters that a model has in place of those that were looked for, for an error."""
    kinds = [own_class(module) for module in model.modules()]
    found = {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if kind.__module__.startswith(_ADAPTERS)}
    if any([getattr(module, "_lycoris_wrappers", None) for module in model.modules()]):
        found.add("layers of a LyCORIS network: pass that to fastkron_py.integrations.lycoris")
    if not found and getattr(model, "loras", None):
        found.add("modules of LyCORIS that are not applied: call its apply_to() first")
    return sorted(found)


def names_read(function: Any) -> set[str]:
    """The global names and attributes that a function reads: those of another version differ. Empty for no Python function."""
    code = getattr(function, "__code__", None)
    return set() if code is None else set(code.co_names)
