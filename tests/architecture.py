"""Laws of the house as functions over sources, so that they can be tried on sources that break them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping

PACKAGE = "lightning_recompute"
Sources = Mapping[str, str]
"""Text of each module of the package by its name without the package's."""


@functools.cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def imports(text: str) -> set[str]:
    """Absolute names of all modules that a module imports, wherever in it, with what is taken from them."""
    found: set[str] = set()
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = ".".join(filter(None, (PACKAGE, module)))
            found |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__") and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.add(first.value)
    return found


def own_imports(sources: Sources) -> dict[str, set[str]]:
    """For each module of the package the others that it imports."""
    graph: dict[str, set[str]] = {}
    for name, text in sources.items():
        parts = (module.split(".") for module in imports(text))
        graph[name] = {part[1] if len(part) > 1 else "__init__" for part in parts if part[0] == PACKAGE}
        graph[name] = {other if other in sources else "__init__" for other in graph[name]}
    return graph


def floors(graph: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """The floor of each module: one above the highest that it imports. Modules in or above a cycle have none."""
    found: dict[str, int] = {}
    while True:
        new = {
            name: 1 + max((found[other] for other in others), default=-1)
            for name, others in graph.items()
            if name not in found and all(other in found for other in others)
        }
        if not new:
            return found
        found |= new


def in_cycles(sources: Sources) -> set[str]:
    """Modules that import each other in a circle, or one that does: then nothing says which is below."""
    graph = own_imports(sources)
    return set(graph) - set(floors(graph))


def reached(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    """A module and all that it imports, directly or not."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


def importers(sources: Sources, libraries: Iterable[str]) -> set[str]:
    """Modules that import one of the libraries themselves."""
    wanted = set(libraries)
    return {name for name, text in sources.items() if wanted & {module.split(".")[0] for module in imports(text)}}


def reaching(sources: Sources, modules: Iterable[str], libraries: Iterable[str]) -> set[str]:
    """Of some modules those that import a library themselves or through others of the package."""
    graph, direct = own_imports(sources), importers(sources, libraries)
    return {name for name in modules if name in sources and reached(graph, name) & direct}


def users_of(sources: Sources, name: str) -> set[str]:
    """Modules whose code, not only its words, has a name in it."""
    return {module for module, text in sources.items() if name in _names(text)}


def callers_of(sources: Sources, function: str) -> set[str]:
    """Modules that call a builtin function."""
    return {
        module
        for module, text in sources.items()
        for node in ast.walk(_parsed(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function
    }


def private_lightning(sources: Sources) -> set[str]:
    """Modules that import a private name of Lightning, or read a private attribute of a trainer."""
    found = set()
    for module, text in sources.items():
        for name in imports(text):
            library, *parts = name.split(".")
            if library in ("lightning", "lightning_fabric", "pytorch_lightning"):
                found |= {module for part in parts if part.startswith("_") and part != "_"}
        for node in ast.walk(_parsed(text)):
            private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
            if private and (_name(node.value) or "").endswith("trainer"):  # type: ignore[attr-defined]
                found.add(module)
    return found


def without_docstring(sources: Sources) -> list[str]:
    """Modules, and public classes, functions and methods, that say nothing about themselves."""
    found = []
    for module, text in sources.items():
        tree = _parsed(text)
        for path, node in [(module, tree), *_public(tree, module)]:
            if ast.get_docstring(node) is None:
                found.append(path)
    return sorted(found)


def too_long(texts: Mapping[str, str], limit: int = 400) -> dict[str, int]:
    """Files with more lines than a reader takes in."""
    lengths = {name: len(text.splitlines()) for name, text in texts.items()}
    return {name: length for name, length in lengths.items() if length > limit}


def untested(sources: Sources, tests: Iterable[str], covered_by: Mapping[str, str]) -> list[str]:
    """Modules without `test_<module>.py` or the file that is listed for them; and entries that are out of date."""
    present = set(tests)
    due = {name: covered_by.get(name, f"test_{name}.py") for name in sources if name != "__init__"}
    missing = [f"{name}: {file}" for name, file in due.items() if file not in present]
    gone = [f"{name} is listed and gone" for name in covered_by if name not in sources]
    needless = [f"{name} has its own file" for name in covered_by if f"test_{name}.py" in present]
    return sorted(missing + gone + needless)


def exports(text: str) -> tuple[list[str], set[str]]:
    """`__all__` of a module, and every public name that it imports from the package or defines."""
    listed: list[str] = []
    public: set[str] = set()
    for node in _parsed(text).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            public |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            public.add(node.name)
        elif isinstance(node, ast.Assign) and _name(node.targets[0]) == "__all__":
            listed = ast.literal_eval(node.value)
    return listed, {name for name in public if not name.startswith("_") or name == "__version__"}


def wrong_exports(text: str) -> list[str]:
    """What is wrong with `__all__`: a name too many, too few, twice, or out of order."""
    listed, public = exports(text)
    found = [f"{name} is not listed" for name in public - set(listed)]
    found += [f"{name} is listed and not there" for name in set(listed) - public]
    # constants, classes, functions, as ruff sorts
    in_order = sorted(set(listed), key=lambda name: (not name.isupper(), name.lstrip("_").islower(), name))
    return sorted(found) or ([] if listed == in_order else [f"the order is {in_order}"])


def _public(node: ast.AST, path: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            if any(_name(decorator) == "setter" for decorator in child.decorator_list):
                continue  # its property says it
            yield f"{path}.{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from _public(child, f"{path}.{child.name}")


def _names(text: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found |= {*node.name.split("."), node.asname or ""}
    return found


def _name(node: ast.AST) -> str | None:
    """`x` of the expressions `x` and `y.x`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
