"""Takes an optimizer out of a training script that cannot be imported, because importing it trains.

`load` executes of a file only the imports, assignments, functions and classes that the wanted names need, directly or
through each other. Nothing of the file is copied here.
"""

import ast
import importlib
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path


def load(path: Path, names: Iterable[str]) -> types.ModuleType:
    """Return a module with some names of a file, and what these need.

    Names that it imports from a file beside it are taken from there in the same way.

    Args:
        path: of a Python file.
        names: that are bound at its top level.

    Raises:
        ImportError: the file, or a name in it, is missing.
    """
    if not path.exists():
        raise ImportError(f"no file {path.name} in the folders of --peers")
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    bound: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        for name in _names_bound(statement):
            bound.setdefault(name, []).append(statement)
    needed: set[ast.stmt] = set()
    imported: set[str] = set()
    left = list(names)
    for name in left:
        if name not in bound:
            raise ImportError(f"{path.name} has no {name}")
    while left:
        for statement in bound.get(left.pop(), []):
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                continue
            if statement not in needed:
                needed.add(statement)
                found = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
                left += sorted(found)
                imported |= found
    module = types.ModuleType(f"peer_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and compilers look their own module up
    for statement in tree.body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            _import(statement, imported, module, path)
        elif statement in needed:
            exec(compile(ast.Module([statement], []), str(path), "exec"), module.__dict__)
    return module


def _names_bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement at the top level binds."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def _import(statement: ast.Import | ast.ImportFrom, wanted: set[str], module: types.ModuleType, importer: Path) -> None:
    """Bind those names of an import that are wanted."""
    for alias in statement.names:
        name = alias.asname or alias.name.partition(".")[0]
        if name not in wanted:
            continue
        if isinstance(statement, ast.Import):
            top = importlib.import_module(alias.name)
            found = top if alias.asname else sys.modules[name]
        else:
            beside = importer.with_name(f"{statement.module}.py")
            if beside.exists():
                source = _once(beside, tuple(one.name for one in statement.names if one.name in wanted))
            else:
                source = importlib.import_module(statement.module or "")
            found = getattr(source, alias.name)
        setattr(module, name, found)


_loaded: dict[tuple[Path, tuple[str, ...]], types.ModuleType] = {}


def _once(path: Path, names: tuple[str, ...]) -> types.ModuleType:
    if (path, names) not in _loaded:
        _loaded[path, names] = load(path, names)
    return _loaded[path, names]
