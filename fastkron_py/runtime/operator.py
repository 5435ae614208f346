"""Operators: one declaration registers everything with torch. Eager calls bypass the dispatcher where that is safe."""

from __future__ import annotations

import inspect
import itertools
import zlib
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fastkron_py.runtime import torch_internals
from fastkron_py.runtime.backend import settings
from fastkron_py.runtime.batching import batchable, batchable_one_by_one, take, vmap_by_sample
from fastkron_py.runtime.call_cache import CACHE, Entry, about, is_logged
from fastkron_py.runtime.eager import is_functionalizing, takes_fast_path, transforms_active, wants_gradient, without_autocast
from fastkron_py.runtime.program import Program, picker

NAMESPACE: Final = "fastkron"  # hub/build.py writes another one here
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
"""Every operator of the library is registered here."""


def source_tag(package: Path) -> str:
    """A tag for the Python files of a package: of equal files equal, wherever they lie."""
    checksum = 0
    for path in sorted(package.rglob("*.py")):
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return f"{NAMESPACE}-{checksum:08x}"


# torch keeps compiled graphs on disk under the names of their operators. What those names mean, their derivatives above all, changes
# with this library's code, which torch does not look at: without a tag, a graph that an older version compiled would be run.
torch.compiler.config.cache_key_tag += source_tag(Path(__file__).parents[1])

_NODES: Final = "nodes of a backward pass"  # a word of `torch_internals.works`
_MOST_REVERSES: Final = 4  # backward passes of a call, which differ in dy's strides or in the gradients that are needed

# Asked at every backward pass: by one name, since each dot of a longer one takes its time.
_is_grad_enabled = torch.is_grad_enabled
_is_watching = torch_internals.is_watching


# ---- one declaration --------------------------------------------------------------------------


class Saved(NamedTuple):
    """The values that a call keeps for its derivatives."""

    tensors: tuple[Any, ...]  # the call's, one after the other; None for those that are absent or not saved
    kept: tuple[Tensor, ...]  # results that are there for the backward pass alone, the operator's and the program's
    shapes: tuple[Any, ...]  # of the tensors, where there is one whose values are not saved; else None
    options: tuple[Any, ...]  # the call's other arguments
    needs: tuple[bool, ...]  # which tensors' gradients are needed
    alone: bool  # whether the kept results were shown to nobody; the registered operator returns them


class GradientCall(NamedTuple):
    """A backward rule as one call."""

    operator: Operator  # that makes the gradients
    tensors: tuple[Tensor | None, ...]  # of its call, in its order; None for those that are absent
    options: tuple[Any, ...]  # of its call
    # for each tensor of the forward call the number of its gradient among the results, `DY` for the incoming gradient itself, or None where
    # no gradient is needed
    places: tuple[int | None, ...]
    overwritten: Tensor | None = None  # one of the tensors, which the operator writes to: saved by a graph that is not kept

    @classmethod
    def of(cls, operator: Operator, tensors: Sequence[Tensor | None], options: Sequence[Any], needs: Sequence[bool]) -> GradientCall:
        """A call whose results are the gradients that are needed, in the order of the forward call's tensors."""
        counter = itertools.count()
        return cls(operator, tuple(tensors), tuple(options), tuple([next(counter) if need else None for need in needs]))

    def run(self, dy: Tensor) -> list[Tensor | None]:
        """The gradient of each tensor of the forward call."""
        found: Any = []
        if any([place not in (None, DY) for place in self.places]):
            found = self.operator(*self.operator._schema.listed(self.tensors), *self.options)
            found = [found] if isinstance(found, Tensor) else found
        if self.overwritten is not None:
            increment_version(self.overwritten)  # whoever reads it nevertheless gets an error
        return [None if place is None else dy if place == DY else found[place] for place in self.places]


DY: Final = -1


class _Schema:
    """The arguments of an operator: tensors, among them at most one list, then options."""

    def __init__(self, schema: str) -> None:
        self.name, _, rest = schema.partition("(")
        given, _, returns = rest.rpartition(") -> ")
        types = [argument.split()[0].replace("(a!)", "").rstrip("?") for argument in given.split(", ")]
        self.count = sum([t in ("Tensor", "Tensor[]") for t in types])
        if any([t.startswith("Tensor") for t in types[self.count :]]):
            raise ValueError(f"schema: expected tensors before other arguments, got {schema}")
        self.options = len(types) - self.count
        self._listed = types.index("Tensor[]") if "Tensor[]" in types else None
        self.returns = returns

    def split(self, arguments: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """(tensors, options): the list's tensors among the others."""
        given, at = arguments[: self.count], self._listed
        tensors = tuple(given) if at is None else (*given[:at], *given[at], *given[at + 1 :])
        return tensors, tuple(arguments[self.count :])

    def listed(self, of_each: Sequence[Any]) -> list[Any]:
        """Values for each tensor, regrouped for each argument: those of a tensor list in a list."""
        at = self._listed
        if at is None:
            return list(of_each)
        stop = len(of_each) - (self.count - 1 - at)
        return [*of_each[:at], list(of_each[at:stop]), *of_each[stop:]]

    def broadcast(self, flags: Sequence[Any], tensors: int) -> tuple[Any, ...]:
        """A flag, or a dimension, for each tensor; torch gives one for a list where it is the same for all."""
        at = self._listed
        if at is None:
            return tuple(flags[: self.count])
        of_list = flags[at]
        if not isinstance(of_list, list | tuple):
            of_list = [of_list] * (tensors - self.count + 1)
        return (*flags[:at], *of_list, *flags[at + 1 : self.count])


class Operator:
    """An operator of tensors and options, registered with torch, and called by the shortest correct path.

    On the eager fast path that is its program, within an autograd function where gradients are wanted. Inside torch.func's
    transforms and forward mode it is that function, or the same result by torch's own operations. Else it is the registered operator,
    through torch's dispatcher.
    """

    def __init__(
        self,
        schema: str,
        *,
        program: Callable[..., Program],
        saving: Callable[..., Program] | None = None,
        fake: Callable[..., Any],
        backward: Callable[..., Sequence[Tensor | None]] | None = None,
        gradient_call: Callable[..., GradientCall | None] | None = None,
        jvp: Callable[..., Any] | None = None,
        vmap: Callable[..., tuple[Any, Any]] | str | None = None,
        in_torch: Callable[..., Any] | None = None,
        kept: int = 0,
        unsaved: Sequence[int] = (),
        scalars: Sequence[int] = (),
        places: Callable[[Sequence[Tensor | None]], Hashable] | None = None,
    ) -> None:
        """Declare it.

        Args:
            schema: name, arguments and results, as torch writes them; tensors first, no defaults: the dispatcher drops arguments that
                equal theirs, and the autograd wrapper then miscounts.
            program: from (tensors, options) to the program that makes the results; the tensors' values are not read.
            saving: the same where a gradient is wanted, if that may be another program: its last results may be intermediates for the
                backward pass.
            fake: from the arguments to results without numbers.
            backward: from (saved, cotangents ...) to the tensors' gradients; its operations are derived for the next order. Where there is
                none, it is the gradient call.
            gradient_call: from (saved, cotangents ...) to the backward rule as one call, or None where it is more than that. A later
                backward pass of the same call runs that call's program at once.
            jvp: from (saved, tangents of the tensors) to those of the results.
            vmap: from (size, dimensions, tensors, options) to (results, their dimensions); "samples" for a call for each sample; or "rows"
                for the same, but one call where the first tensor alone has samples, which are more of its rows.
            in_torch: from (tensors, options) to the results, for transforms, where there is no jvp.
            kept: how many of the results, the last, are for the backward pass alone.
            unsaved: tensors whose values the derivatives do not read, by index.
            scalars: options that a program is run with, by index; all others it is built for.
            places: from the tensors to the properties of their addresses that the program depends on, beyond alignment.
        """
        self._schema = _Schema(schema)
        self.name = self._schema.name
        self._build, self._saving, self._kept, self._unsaved, self._scalars = program, saving, kept, frozenset(unsaved), tuple(scalars)
        self._numbers = picker(self._scalars)  # from the options to the numbers that a program is run with
        self._is_single = self._schema.returns == "Tensor"
        self._gradient_call, self._jvp, self._in_torch, self._places = gradient_call, jvp, in_torch, places
        self._vmap = partial(self._vmap_by_sample, vmap == "rows") if isinstance(vmap, str) else vmap
        if backward is None and gradient_call is not None:
            backward = lambda saved, *cotangents: gradient_call(saved, *cotangents).run(cotangents[0])  # type: ignore[union-attr] # noqa: E731
        self._backward = backward
        # Lets rules take batches of gradients. Those of in_torch call autograd, so they take one sample at a time.
        self._over: Callable[[Callable[..., Any]], Callable[..., Any]] = batchable if in_torch is None else batchable_one_by_one
        full = f"{NAMESPACE}::{self.name}"
        LIBRARY.define(schema)
        LIBRARY.impl(self.name, self._implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(full, fake, lib=LIBRARY)
        if backward is not None:
            torch.library.register_autograd(full, self._over(self._backward_of_operator), setup_context=self._setup_operator, lib=LIBRARY)
        if vmap is not None:
            torch.library.register_vmap(full, self._vmap_of_operator, lib=LIBRARY)
        self.registered = getattr(getattr(torch.ops, NAMESPACE), self.name)
        self._function = _function_of(self)
        # Without the part for torch.func's transforms, which the fast path never sees.
        self._apply: Any = super(torch.autograd.Function, _node_of(self)).apply  # type: ignore[misc]

    def __call__(self, *arguments: Any, key: Hashable = None) -> Any:
        """The results but for those that are kept.

        Args:
            arguments: as in the schema.
            key: of the call in the cache, if the verb has looked it up without success; it covers the options.
        """
        if torch.compiler.is_compiling():
            return self._shown(self.registered(*arguments))
        tensors, options = self._schema.split(arguments)
        given = _present(tensors)
        if key is None:
            key = self._key(tensors, options)
            entry = CACHE.find(key, given)
            if entry is not None:
                return entry.call(given, options)
        if transforms_active():
            if self._in_torch is not None:
                return self._in_torch(tensors, options)
            if not is_functionalizing():  # where no autograd function may be
                return self._shown(self._function.apply(options, *tensors))
        elif takes_fast_path(tensors):
            program = self._program(tensors, options, self._saving is not None and wants_gradient(tensors))
            call = self._call_of(program, tensors)
            found = call(given, options)
            CACHE.keep(key, given, program, call, options, self.name)
            return found
        return self._shown(self.registered(*arguments))

    def _call_of(self, program: Program, tensors: Sequence[Tensor | None]) -> Callable[..., Any]:
        """The function that runs a program on tensors like these; where a gradient is wanted, autograd's rule or the program's own."""
        plain, run, numbers = program.plain, program.__call__, self._numbers  # Python calls a method in less time than its object
        if plain is not None and (program.differentiable is not None or not wants_gradient(tensors)):
            return lambda given, options: plain(*given)
        if wants_gradient(tensors):
            if program.differentiable is not None:
                return partial(self._by_autograd, program)
            call, apply = Differentiable(self, tensors, program), self._apply
            if call.is_single:
                return lambda given, options: apply(call, options, *given)
            return lambda given, options: self._shown(apply(call, options, *given), program.saved)
        if not self._is_single:
            return lambda given, options: self._shown(self._results(program, given, options))
        return lambda given, options: run(given, numbers(options))[0]

    def _by_autograd(self, program: Program, given: Sequence[Tensor], options: tuple[Any, ...]) -> Any:
        """The result of a program whose operations autograd records."""
        with without_autocast(given[0].device):
            return program.differentiable(*given, *self._numbers(options))  # type: ignore[misc]

    # ---- programs --------------------------------------------------------------------------------

    def entry(self, tensors: Sequence[Tensor | None], options: Sequence[Any]) -> Entry | None:
        """The call of the cache that serves these arguments, if there is one."""
        return CACHE.find(self._key(tensors, options), _present(tensors))

    def _key(self, tensors: Sequence[Tensor | None], options: Sequence[Any]) -> Hashable:
        """The key of a program, without its tensors' properties."""
        given = [tuple(o) if isinstance(o, list) else o for o in options]
        for index in self._scalars:
            given[index] = (options[index] == 1.0) - (options[index] == 0.0)  # kernels without a product or a sum
        return self.name, *given, *[i for i, t in enumerate(tensors) if t is None]

    def _program(self, tensors: Sequence[Tensor | None], options: tuple[Any, ...], saves: bool = False) -> Program:
        places = None if self._places is None else self._places(tensors)
        key = self._key(tensors, options), *about(tensors), tensors[0].device, places, saves  # type: ignore[union-attr]
        build = self._saving if saves and self._saving is not None else self._build
        return CACHE.program(key, lambda: build(tensors, options))

    def _results(self, program: Program, given: Sequence[Tensor], options: Sequence[Any]) -> Any:
        """A program's results as the schema has them."""
        found = program(given, self._numbers(options))
        return found[0] if self._is_single else list(found) if self._schema.returns == "Tensor[]" else tuple(found)

    def _shown(self, found: Any, saved: int = 0) -> Any:
        """The results but for those that are kept, and those that the program saves; autograd functions make tuples of lists."""
        if self._is_single:
            return found[0] if saved else found
        found = found[: len(found) - saved] if saved else found
        if not self._kept:
            return list(found) if self._schema.returns == "Tensor[]" else found
        shown = found[: len(found) - self._kept]
        return shown[0] if len(shown) == 1 else shown

    def _implementation(self, *arguments: Any) -> Any:
        tensors, options = self._schema.split(arguments)
        return self._results(self._program(tensors, options), _present(tensors), options)

    # ---- the rules, for the operator and for its function ------------------------------------------

    def _saved(self, ctx: Any, needs: Sequence[bool], found: tuple[Any, ...]) -> Saved:
        """The values that were saved; needs: of the tensors that there are; found: the saved tensors."""
        call = ctx.call
        read, kept = found[: len(call.read)], found[len(call.read) :]
        return Saved(call.spread(read, call.read), kept, call.shapes, ctx.options, call.spread(needs, call.present, False), call.alone)

    def _reverse(self, ctx: Any, needs: Sequence[bool], found: tuple[Any, ...], cotangents: tuple[Any, ...]) -> Sequence[Tensor | None]:
        """The gradients of all tensors by the backward rule; arguments as in `_saved`."""
        if not any(needs) or self._backward is None:
            return [None] * ctx.call.count
        return self._backward(self._saved(ctx, needs, found), *cotangents[: len(cotangents) - ctx.call.kept])

    def _setup_operator(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, options = self._schema.split(inputs)
        Differentiable(self, tensors, alone=False).save(ctx, _present(tensors), options, output)

    def _backward_of_operator(self, ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        if self._schema.returns == "Tensor[]":
            (cotangents,) = cotangents
        needs = self._schema.broadcast(ctx.needs_input_grad, ctx.call.count)
        found = self._reverse(ctx, [needs[i] for i in ctx.call.present], ctx.saved_tensors, tuple(cotangents))
        return *self._schema.listed(found), *[None] * self._schema.options

    def _vmap_by_sample(
        self, has_rows: bool, size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]
    ) -> tuple[Any, Any]:
        if has_rows and all([dim is None for dim in dims[1:]]):
            x, *rest = tensors
            found = self.registered(*self._schema.listed([x.movedim(dims[0], 0), *rest]), *options)
            return found, 0 if self._is_single else (0,) * len(found)

        def call(*arguments: Any) -> Any:
            return self.registered(*self._schema.listed(arguments[: len(tensors)]), *options)

        return vmap_by_sample(call, size, dims, tensors, ())

    def _vmap_of_operator(self, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        tensors, options = self._schema.split(arguments)
        return self._vmap(info.batch_size, self._schema.broadcast(in_dims, len(tensors)), tensors, options)  # type: ignore[misc]


def asked_for(ctx: Any, needs: Sequence[bool]) -> tuple[bool, ...]:
    """needs_input_grad of the tensors that there are, without those that this backward pass does nothing with.

    ``torch.autograd.grad(y, x, create_graph=True)`` needs no gradient of a layer's parameters, which torch's flags do not say. Where
    no graph is kept, all that is needed is taken to be asked for: that is a whole backward pass, whose program is kept.

    Args:
        ctx: the function's.
        needs: for each tensor.
    """
    following = getattr(ctx, "next_functions", None)
    if following is None or torch.compiler.is_compiling() or not torch_internals.works(_NODES):
        return tuple(needs)

    def is_asked(node: Any) -> bool:
        try:
            return node is None or torch_internals.will_execute(node)
        except RuntimeError:  # of a leaf that gradients are taken of
            return True

    return tuple([need and is_asked(node) for need, (node, _) in zip(needs, following, strict=True)])


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def _function_of(operator: Operator) -> type[torch.autograd.Function]:
    """The autograd function of an operator inside of torch.func's transforms: its arguments are the options and the tensors."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(options: tuple[Any, ...], *tensors: Any) -> Any:
            if not takes_fast_path(tensors):  # inside a transform that has been peeled off: other tensors may be left
                found = operator.registered(*operator._schema.listed(tensors), *options)
            else:
                found = operator._results(operator._program(tensors, options), _present(tensors), options)
            return tuple(found) if isinstance(found, list) else found

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            values = Differentiable(operator, inputs[1:]).save(ctx, _present(inputs[1:]), inputs[0], output)
            if operator._jvp is not None:
                ctx.save_for_forward(*values)

        @staticmethod
        @operator._over
        def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
            needs = tuple([ctx.needs_input_grad[1 + i] for i in ctx.call.present])
            if torch.is_grad_enabled():
                needs = asked_for(ctx, needs)
            return None, *operator._reverse(ctx, needs, ctx.saved_tensors, cotangents)

        @staticmethod
        @operator._over
        def jvp(ctx: Any, _options: None, *tangents: Any) -> Any:
            found = operator._jvp(operator._saved(ctx, [True] * len(ctx.call.present), ctx.saved_tensors), tangents)  # type: ignore[misc]
            return tuple(found) if isinstance(found, list) else found

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], options: tuple[Any, ...], *tensors: Any) -> tuple[Any, Any]:
            found, dims = operator._vmap(info.batch_size, in_dims[1:], tensors, options)  # type: ignore[misc]
            return (tuple(found), tuple(dims)) if isinstance(found, list) else (found, dims)

    if operator._jvp is None:
        del Function.jvp
    if operator._vmap is None:
        del Function.vmap
    Function.__name__ = Function.__qualname__ = operator.name
    # Else torch works it out at every call, which takes longer than a small kernel.
    Function.forward.__signature__ = inspect.signature(Function.forward)  # type: ignore[attr-defined]
    return Function


# ---- the eager fast path ------------------------------------------------------------------------


class _Reverse(NamedTuple):
    """A backward pass that was made before."""

    key: tuple[Any, ...]  # the forward call's options, and the settings that were in force
    check: Callable[..., bool]  # whether other tensors are like the program's inputs
    takes: Callable[[Sequence[Tensor]], bool] | None  # as of `Entry`
    run: Callable[..., Sequence[Tensor]]  # the program
    numbers: tuple[float, ...]  # the program's scalars
    is_kept: bool | None  # whether the graph was kept for another backward pass; None where that makes no difference
    overwritten: int | None  # a saved tensor that the program writes to, by its number among dy and the saved tensors
    picks: Callable[[Any], tuple[Tensor, ...]] | None  # its inputs, as numbers among dy and the saved tensors; None for all in this order
    # from the program's results, dy and None to what the node returns: the gradients of the tensors that there are
    spread: Callable[[Any], tuple[Tensor | None, ...]]


class Differentiable:
    """A call of an operator where gradients are wanted: what it saves, and the programs of its backward passes.

    Attributes:
        name: of the operator.
        run: the program of a call on the eager fast path.
        alone: as of `Saved`.
        count: of the tensors, those that are absent among them.
        present: tensors that are there, by index.
        read: those whose values the derivatives read, by index.
        shapes: of the tensors, where some are not read; else None.
        kept: how many results are for the backward pass alone, the operator's and the program's.
        is_single: whether the program has one result.
        reverses: backward passes that were made.
    """

    __slots__ = ("_picks", "alone", "count", "is_single", "kept", "name", "present", "read", "reverses", "run", "shapes")

    def __init__(self, operator: Operator, tensors: Sequence[Tensor | None], program: Program | None = None, *, alone: bool = True) -> None:
        """For tensors like these."""
        saved = 0 if program is None else program.saved
        self.run: Any = None if program is None else program.__call__
        self.name, self.alone, self.count = operator.name, alone, len(tensors)
        self.kept, self.is_single = operator._kept + saved, operator._is_single and not saved
        unsaved = {i % self.count for i in operator._unsaved}
        self.present = [i for i, t in enumerate(tensors) if t is not None]
        self.read = [i for i in self.present if i not in unsaved]
        self._picks = None if self.read == self.present else [self.present.index(i) for i in self.read]
        self.shapes = None if self._picks is None else [None if t is None else t.shape for t in tensors]
        self.reverses: list[_Reverse] = []

    def spread(self, values: Sequence[Any], indices: Sequence[int], absent: Any = None) -> tuple[Any, ...]:
        """Values for all tensors, of those for some."""
        found = [absent] * self.count
        for i, value in zip(indices, values, strict=True):
            found[i] = value
        return tuple(found)

    def save(self, ctx: Any, given: Sequence[Any], options: tuple[Any, ...], output: Any) -> Sequence[Any]:
        """Save the values that the derivatives read; return the tensors among them.

        Args:
            ctx: the function's.
            given: the tensors that there are.
            options: of the call.
            output: its results.
        """
        ctx.call, ctx.options = self, options
        values = given if self._picks is None else [given[i] for i in self._picks]
        if self.kept:
            kept = output[-self.kept :]
            ctx.mark_non_differentiable(*kept)
            torch_internals.want_no_zeros(ctx)
            ctx.save_for_backward(*values, *kept)
        else:
            ctx.save_for_backward(*values)
        return values

    def reverse(self, options: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[Tensor | None, ...] | None:
        """What the node returns, by a program that a backward pass like this one has run, None if there was none.

        Args:
            options: of the call.
            values: dy and what was saved.
        """
        if _is_watching() or is_logged():
            return None
        wanted = options, settings()
        for key, check, takes, run, numbers, is_kept, overwritten, picks, spread in self.reverses:
            given = values if picks is None else picks(values)
            if key != wanted or not check(*given) or not (takes is None or takes(given)):
                continue
            if is_kept is None or is_kept == torch_internals.keeps_graph():
                found = run(given, numbers)
                if overwritten is not None:
                    increment_version(values[overwritten])
                return spread((*found, values[0], None))
        return None

    def keep(self, call: GradientCall, options: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        """Keep the program of the backward operator's call that a backward pass was made by; values: as in `reverse`."""
        given, operator = _present(call.tensors), call.operator
        picks = [next((i for i, v in enumerate(values) if v is t), -1) for t in given]
        entry = operator.entry(call.tensors, call.options) if given and -1 not in picks else None
        if entry is not None and entry.program is not None:
            places = [None, None, *[call.places[i] for i in self.present]]  # of a node's arguments
            spread = picker([-1 if place is None else -2 if place == DY else place for place in places])
            picked = None if picks == list(range(len(values))) else picker(picks)
            overwritten = next((i for i, v in enumerate(values) if v is call.overwritten), None)
            is_kept = torch_internals.keeps_graph() if self.kept else None  # what was saved for this alone may be overwritten
            run, numbers = entry.program.__call__, operator._numbers(call.options)
            self.reverses.append(
                _Reverse((options, settings()), entry.check, entry.takes, run, numbers, is_kept, overwritten, picked, spread)
            )
            del self.reverses[:-_MOST_REVERSES]


def _node_of(operator: Operator) -> type[torch.autograd.Function]:
    """The autograd function of an operator on the eager fast path, which torch.func's transforms never see.

    Its arguments are a `Differentiable`, the options, and the tensors that there are.
    """

    @operator._over
    def general(state: tuple[Any, Sequence[bool], tuple[Any, ...]], *cotangents: Any) -> Sequence[Tensor | None]:
        ctx, needs, found = state
        if operator._gradient_call is not None and any(needs) and not _is_grad_enabled() and not torch_internals.is_batching():
            call = operator._gradient_call(operator._saved(ctx, needs, found), *cotangents[: len(cotangents) - ctx.call.kept])
            if call is not None:
                made = call.run(cotangents[0])
                ctx.call.keep(call, ctx.options, (cotangents[0], *found))
                return made
        return operator._reverse(ctx, needs, found, cotangents)

    numbers = operator._numbers

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: Differentiable, options: tuple[Any, ...], *given: Tensor) -> Any:
            found: Any = call.run(given, numbers(options))
            found = found[0] if call.is_single else tuple(found)
            call.save(ctx, given, options, found)
            return found

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
            call, found = ctx.call, ctx.saved_tensors  # read once: a checkpoint makes them anew
            is_first_order = not _is_grad_enabled()
            returned: tuple[Any, ...] | None = None
            if is_first_order and call.reverses:
                returned = call.reverse(ctx.options, (cotangents[0], *found))
            if returned is None:
                needs = ctx.needs_input_grad[2:]
                made = general((ctx, needs if is_first_order else asked_for(ctx, needs), found), *cotangents)
                returned = None, None, *[made[i] for i in call.present]
            return returned

    Node.__name__ = Node.__qualname__ = operator.name
    return Node


def second_order(
    forward: Callable[..., Tensor], dy: Tensor, inputs: Sequence[Tensor | None], cotangents: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Derive the operator that takes dy and the inputs to the inputs' gradients; the result is differentiable where autograd is enabled.

    Args:
        forward: from the inputs to y, in torch.
        dy: the gradient of y.
        inputs: None for those that are absent.
        cotangents: of the inputs' gradients; None for those that have none.

    Returns:
        The cotangents of dy and of each input; None for inputs that are absent.
    """
    differentiable = torch.is_grad_enabled()
    present = [t is not None for t in inputs]
    with torch.enable_grad():
        # Inputs of their own: in a network dy is itself a function of them, and a gradient for an input must not go by way of dy. Views
        # stay connected to the originals, for derivatives of the result.
        dy, *own = [
            t.view_as(t) if differentiable and t.requires_grad else t.detach().requires_grad_() for t in (dy, *inputs) if t is not None
        ]
        y, all_zero = forward(*take(own, present)), {"allow_unused": True, "materialize_grads": True}
        gradients = take(torch.autograd.grad(y, own, dy, create_graph=True, **all_zero), present)
        # A gradient without a graph is constant: of an input that y does not depend on.
        pairs = [(g, c) for g, c in zip(gradients, cotangents, strict=True) if g is not None and c is not None and g.requires_grad]
        found = torch.autograd.grad([g for g, _ in pairs], (dy, *own), [c for _, c in pairs], create_graph=differentiable, **all_zero)
    return found[0], *take(found[1:], present)
