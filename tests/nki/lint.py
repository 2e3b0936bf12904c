"""The Python that a kernel may use: a check of its source, and of every function it calls outside of `nki`.

NKI compiles a subset of Python, which up to 0.6 its own parser reads and from 0.7 a tracer ("NKI Language Guide",
"NKI Migration Guide from Beta 1 to Beta 2"). What is refused here is what one of the two may not take.
"""

import ast
import inspect
import textwrap
from types import FunctionType, ModuleType

from tests.nki.memory import NkiError

REFUSED = {
    ast.Raise: "raise: use assert",
    ast.Try: "try",
    ast.With: "with",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
    ast.AsyncFunctionDef: "async",
    ast.Lambda: "lambda: use def",
    ast.Is: "is: use ==",
    ast.IsNot: "is not: use !=",
    ast.Global: "global",
    ast.Nonlocal: "nonlocal",
    ast.NamedExpr: ":=",
    ast.Match: "match",
    ast.ClassDef: "class",
    ast.Delete: "del",
    ast.Import: "import",
    ast.ImportFrom: "import",
    ast.Starred: "*",
    ast.ListComp: "a comprehension: use a loop",
    ast.SetComp: "a comprehension: use a loop",
    ast.DictComp: "a comprehension: use a loop",
    ast.GeneratorExp: "a generator: use a loop",
}


def check_python(kernel: FunctionType) -> None:
    """Raise NkiError, with file and line, on Python that a kernel may not use."""
    seen, todo = {kernel}, [kernel]
    while todo:
        fn = todo.pop()
        for helper in _check_function(fn, may_be_decorated=fn is kernel):
            if helper not in seen:
                seen.add(helper)
                todo.append(helper)


def _check_function(fn: FunctionType, may_be_decorated: bool) -> list[FunctionType]:
    """Check one function; returns the functions of the project that it names."""
    lines, first = inspect.getsourcelines(fn)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    helpers = []
    if may_be_decorated:
        tree.body[0].decorator_list.clear()

    def refuse(node: ast.AST, what: str) -> None:
        line = first + getattr(node, "lineno", 1) - 1
        raise NkiError(f"{inspect.getsourcefile(fn)}:{line}: in {fn.__name__}, a kernel may not use {what}")

    for node in ast.walk(tree):
        for operator in [node, *getattr(node, "ops", [])]:
            if type(operator) in REFUSED:
                refuse(node, REFUSED[type(operator)])
        if isinstance(node, ast.FunctionDef):
            if node.decorator_list:
                refuse(node, "a decorator on a helper")
            if node.args.kwonlyargs or node.args.vararg or node.args.kwarg:
                refuse(node, "keyword-only or variable arguments")
        value = _find_value(node, fn)
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
        if home.split(".")[0] in ("numpy", "torch", "math"):
            refuse(node, f"the module {home}")
        if isinstance(value, FunctionType):
            helpers.append(value)
    return helpers


def _find_value(node: ast.AST, fn: FunctionType):
    """What a name, or a name in a module other than nki's, stands for where `fn` is written; None for anything else."""
    if isinstance(node, ast.Name):
        return fn.__globals__.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        module = fn.__globals__.get(node.value.id)
        if isinstance(module, ModuleType) and not module.__name__.startswith(("nki.", "tests.nki.")):
            return getattr(module, node.attr, None)
    return None
