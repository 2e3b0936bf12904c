"""Which function computes an operation: PyTorch's default, a kernel of ours, or your own. docs/kernels.md shows how.

    @operation("rms_norm", "x weight eps")            # model.py: the default, and what an override must take
    def rms_norm(x, weight, eps): ...

    lines = choose(["moe_experts=nki", "rms_norm=my_kernels:rms_norm"])       # what --kernel was given
    rms_norm(x, weight, eps)                          # is now the function in my_kernels.py

The choice holds for the process. Kernels are imported when they are chosen, not before.
"""

import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from qwen3_trn.errors import UserError


class Alternative(NamedTuple):
    """A registered kernel. Functions are callables, or "package.module:function" to import when it is chosen."""

    function: str | Callable
    available: Callable[[], str | None]
    needs: str | Callable[..., str | None]


class Override(NamedTuple):
    """A chosen kernel. needs: of the operation's arguments, why it cannot take them."""

    name: str
    function: Callable
    needs: Callable[..., str | None]


_defaults: dict[str, Callable] = {}
_parameters: dict[str, list[str]] = {}
_alternatives: dict[str, dict[str, Alternative]] = {}
_overrides: dict[str, Override] = {}


def operation(name: str, parameters: str) -> Callable[[Callable], Callable]:
    """Declare an operation: decorates its PyTorch default, and returns what calls the chosen implementation.

    parameters: names of what an override takes, in the order in which it gets them.
    """

    def declare(default: Callable) -> Callable:
        _defaults[name], _parameters[name], _alternatives[name] = default, parameters.split(), {}

        @functools.wraps(default)
        def run_chosen(*args, **kwargs):
            function = _overrides[name].function if name in _overrides else default
            return function(*args, **kwargs)

        return run_chosen

    return declare


def register(
    op: str,
    name: str,
    function: str | Callable,
    *,
    available: Callable[[], str | None] = lambda: None,
    needs: str | Callable[..., str | None] = lambda *args: None,
) -> None:
    """Offer `function` as --kernel OP=NAME. It, and `needs`, may be "package.module:function", imported when chosen.

    available: why it cannot run on this machine, as a package that is missing; None if it can. needs: the same for
    the operation's arguments, which are tensors of the run's shapes on the meta device. Raises UserError for an
    operation that does not exist.
    """
    _known(op)[name] = Alternative(function, available, needs)


def missing_packages(*names: str) -> str | None:
    """For `available`: what to install, of packages that come from AWS's Neuron index; None if all are there."""
    missing = [name for name in names if sys.modules.get(name) is None and importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return (
        f"{' and '.join(missing)} must be installed, from AWS's Neuron index: docs/trainium.md has the command. "
        "Packages of the same names elsewhere are placeholders"
    )


def choose(specs: Sequence[str]) -> list[str]:
    """Make OP=NAME or OP=package.module:function, each of `specs`, run in place of the defaults; of others, none.

    Returns the lines that say what runs, and what else could or could not. Raises UserError for a spec that cannot be.
    """
    chosen: dict[str, Override] = {}
    for spec in specs:
        op, separator, name = spec.partition("=")
        alternatives = _known(op)
        ours = f"ours: {', '.join(alternatives)}" if alternatives else "there is none of ours"
        if not separator:
            raise UserError(
                f"--kernel {spec}: expected {spec}=NAME, {ours}, or {spec}=package.module:function, your own."
            )
        if op in chosen:
            raise UserError(f"--kernel names {op} twice: {chosen[op].name} and {name}. Remove one.")
        if re.fullmatch(r"\w+(\.\w+)*:\w+", name):
            kernel = Alternative(name, lambda: None, lambda *args: None)
        elif name in alternatives:
            kernel = alternatives[name]
        else:
            raise UserError(
                f"--kernel {spec}: there is no kernel {name!r} for {op} ({ours}); your own is named "
                "package.module:function."
            )
        if reason := kernel.available():
            raise UserError(f"--kernel {spec} cannot run here: {reason}.")
        function, needs = _load(kernel.function, spec), _load(kernel.needs, spec)
        _check_signature(function, op, spec)
        chosen[op] = Override(name, function, needs)
    _overrides.clear()
    _overrides.update(chosen)
    return _describe()


def overrides() -> dict[str, Override]:
    """What was chosen, by operation. Those that run their default are not in it."""
    return dict(_overrides)


def default_of(op: str) -> Callable:
    """PyTorch's implementation of an operation, whatever was chosen."""
    return _defaults[op]


def parameters_of(op: str) -> list[str]:
    """The names of what an override takes."""
    return _parameters[op]


def uses_default(op: str) -> bool:
    return op not in _overrides


def _known(op: str) -> dict[str, Alternative]:
    if op not in _alternatives:
        raise UserError(
            f"--kernel: there is no operation {op!r}. Expected OP=NAME with OP one of {', '.join(_defaults)}."
        )
    return _alternatives[op]


def _load(function: str | Callable, spec: str) -> Callable:
    """The function that "package.module:function" names; what is no string is returned as it is."""
    if not isinstance(function, str):
        return function
    module_name, _, attribute = function.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"--kernel {spec}: importing {module_name} fails: {error}. Modules are looked for in what is installed and "
            "in the folders of PYTHONPATH."
        ) from error
    found: Any = getattr(module, attribute, None)
    if not callable(found):
        what = (
            "has nothing of this name" if found is None else f"is of type {type(found).__name__}, expected a function"
        )
        raise UserError(f"--kernel {spec}: {attribute!r} in {module.__file__} {what}.")
    return found


def _check_signature(function: Callable, op: str, spec: str) -> None:
    """Raises UserError if `function` does not take the operation's parameters, by position and under their names.

    Parameters of its own must have defaults. *args may stand for any number, as in torch's custom operations.
    """
    expected = _parameters[op]
    try:
        signature = inspect.signature(function)
    except ValueError as error:  # of a builtin
        raise UserError(f"--kernel {spec}: {error}. Call it from a function ({', '.join(expected)}).") from error
    parameters = list(signature.parameters.values())
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = [p for p in parameters if p.name not in expected and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_more = any(p.kind == p.VAR_POSITIONAL for p in parameters)
    fits = named[: len(expected)] == (expected[: len(named)] if takes_more else expected)
    if not fits or any(p.default is p.empty for p in rest):
        raise UserError(f"--kernel {spec}: it takes {signature}; {op} is called with ({', '.join(expected)}).")


def _describe() -> list[str]:
    chosen = "".join(f"{op}: {override.name}; " for op, override in _overrides.items())
    lines = [f"kernels    {chosen}{'the rest ' if chosen else ''}PyTorch's"]
    for op, alternatives in _alternatives.items():
        for name, alternative in alternatives.items():
            if uses_default(op):
                reason = alternative.available()
                lines += [f"           not {op}={name}: {reason or 'it was not chosen'}"]
    return lines
