"""Changing modules of other libraries in place: an instance is given a subclass of its own class, which has another forward pass.

Modules, parameters, their names and their memory stay as they are: nothing that reads or writes a model's state sees a difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from torch import nn

from fastkron_py.runtime.errors import type_error, type_name, value_error

AppliedT = TypeVar("AppliedT", bound="Applied")
_SHOWN: Final = 3  # reasons, or kinds of modules, in an error
_PATCHED: Final = "already patched by use_fastkron"
_ADAPTERS: Final = ("peft.tuners.", "lycoris.modules.", "fastkron_py.nn.lokr")  # modules of their classes


class Replacement(nn.Module):
    """The base of forward passes that take the place of that of an instance's own class, which ``super().forward`` still calls.

    Attributes:
        PREFIX: of the names of the subclasses.
    """

    PREFIX: ClassVar[str]

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
    """The class that a module had before it was changed."""
    classes = type(module).__mro__
    return classes[classes.index(Replacement) + 1]


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
        leave: Callable[[nn.Module], None],
        classes: Mapping[str, str],
    ) -> None:
        self._modules = dict(modules)
        self._leave = leave
        self._classes = dict(classes)  # of all these modules
        self.replaced: tuple[str, ...] = tuple(modules)
        self.left_alone: Mapping[str, str] = dict(left_alone)

    def close(self) -> None:
        """Change the modules back; a second time has no effect."""
        for module in self._modules.values():
            self._leave(module)
        self._modules.clear()

    def __enter__(self: AppliedT) -> AppliedT:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.replaced)} replaced, {len(self.left_alone)} left alone)"

    def __str__(self) -> str:
        reasons = {name: f"left alone: {reason}" for name, reason in self.left_alone.items()}
        lines = Counter([f"{kind} {reasons.get(name, 'replaced')}" for name, kind in self._classes.items()])
        return "\n".join([repr(self), *[f"  {count} {line}" for line, count in lines.items()]])


class Patch(NamedTuple):
    """A change of the modules of one kind, in place, and the way back.

    Attributes:
        argument: that the model is, in errors.
        expected: the modules that can be changed, in an error.
        replacement: their new forward pass.
        is_candidate: whether a module is of the kind.
        obstacle: why a candidate cannot be changed, or None.
        options: names of the attributes that a module is given.
        moved: is called with a module that has been changed, or changed back.

    Functions are those of modules: a model that holds its `Applied` can be pickled.
    """

    argument: str
    expected: str
    replacement: type[Replacement]
    is_candidate: Callable[[Any], bool]
    obstacle: Callable[[Any], str | None]
    options: tuple[str, ...] = ()
    moved: Callable[[nn.Module], None] | None = None

    def apply(self, model: Any, kind: type[AppliedT], *options: Any) -> AppliedT:
        """Change a model's modules; none if they were changed before.

        Args:
            model: to look through.
            kind: of the result.
            *options: values of the attributes.

        Raises:
            TypeError: the model is no module.
            ValueError: no module can be changed: it says why.
        """
        found: dict[str, nn.Module] = {}
        left_alone: dict[str, str] = {}
        classes: dict[str, str] = {}
        for name, module in self._modules(model):
            if self.is_candidate(module):
                classes[name] = type(module).__name__
                reason = _PATCHED if isinstance(module, Replacement) else self.obstacle(module)
                if reason is None:
                    found[name] = module
                else:
                    left_alone[name] = reason
        if not found and _PATCHED not in left_alone.values():
            raise value_error(self.argument, self.expected, reasons(model, left_alone))
        for module in found.values():
            module.__dict__.update(zip(self.options, options, strict=True))
            module.__class__ = replacement_class(self.replacement, type(module))
            self._moved(module)
        return kind(found, left_alone, self.leave, classes)

    def leave(self, module: nn.Module) -> None:
        """Change a module back; without effect on one that was not changed."""
        if isinstance(module, self.replacement):
            module.__class__ = own_class(module)
            for name in self.options:
                module.__dict__.pop(name, None)
            self._moved(module)

    def _moved(self, module: nn.Module) -> None:
        if self.moved is not None:
            self.moved(module)

    def revert(self, model: Any) -> None:
        """Change all modules of a model back.

        Raises:
            TypeError: the model is no module.
        """
        for _, module in self._modules(model):
            self.leave(module)

    def _modules(self, model: Any) -> Iterator[tuple[str, nn.Module]]:
        """Every module of a model, with its name."""
        if not isinstance(model, nn.Module):
            raise type_error(self.argument, "a torch.nn.Module", type_name(model))
        yield from model.named_modules()


def reasons(model: nn.Module, left_alone: Mapping[str, str]) -> str:
    """Why nothing in a model was changed, for an error."""
    if not left_alone:
        instead = _adapters(model)
        if instead:
            return f"{type_name(model)} with {', '.join(instead)}"
        kinds = list(dict.fromkeys(type(module).__name__ for module in model.modules()))
        others = f" and {len(kinds) - _SHOWN} other kinds" if len(kinds) > _SHOWN else ""
        return f"{type_name(model)}, which has none among its modules ({', '.join(kinds[:_SHOWN])}{others})"
    shown = [f"{name or 'it'}: {reason}" for name, reason in left_alone.items()][:_SHOWN]
    more = len(left_alone) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


def _adapters(model: nn.Module) -> list[str]:
    """The adapters that a model has in place of those that were looked for, for an error."""
    kinds = [own_class(module) if isinstance(module, Replacement) else type(module) for module in model.modules()]
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
