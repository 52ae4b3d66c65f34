"""What the plugin uses of SGLang, read from its source and looked up in the installed release.

Runs in the fork server. A name that a release has dropped, or an argument that it does not take, is
found without serving anything, also where the code runs on a GPU alone.
"""

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path


def find_missing(folder):
    """Every use that the installed SGLang does not meet, as "file:line what"."""
    return [
        f"{path.name}:{line} {problem}"
        for path in sorted(Path(folder).glob("*.py"))
        for line, problem in check_source(path.read_text(encoding="utf-8"))
    ]


def check_source(source):
    """Imports from SGLang, and calls of what was imported; pairs of line and problem."""
    tree = ast.parse(source)
    problems = []
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]:
        imported = {}
        for statement in scope.body if scope is tree else ast.walk(scope):
            for name, symbol in _imports(statement):
                if isinstance(symbol, str):
                    problems.append((statement.lineno, symbol))
                else:
                    imported[name] = symbol
        problems += [
            (call.lineno, problem)
            for call in ast.walk(scope)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
            if call.func.id in imported and (problem := _call_problem(call, imported))
        ]
    return sorted(set(problems))  # of nested functions, twice


def _imports(statement):
    # Name and symbol of what one statement imports from SGLang; a string says that it is missing.
    if not isinstance(statement, ast.ImportFrom) or statement.module.split(".")[0] != "sglang":
        return
    if not _exists(statement.module):
        yield "", f"no module {statement.module}"
        return
    module = importlib.import_module(statement.module)
    for alias in statement.names:
        missing = f"no {alias.name} in {statement.module}"
        if not hasattr(module, alias.name) and _exists(f"{statement.module}.{alias.name}"):
            importlib.import_module(f"{statement.module}.{alias.name}")
        yield alias.asname or alias.name, getattr(module, alias.name, missing)


def _exists(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package
        return False


def _call_problem(call, imported):
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    signature = inspect.signature(imported[call.func.id])
    try:
        signature.bind_partial(*([] if starred else call.args), **keywords)
    except TypeError as error:
        return f"{call.func.id}: {error}"
    return None


def find_uninherited(class_source):
    """Attributes that our worker takes from SGLang's and the installed release does not give it."""
    from sgl_eagle.plugin.compat import eagle_worker_class

    tree = ast.parse(Path(class_source).read_text(encoding="utf-8"))
    used, own = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            own |= {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        if not isinstance(node, ast.Attribute):
            continue
        of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
        if of_self and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif of_self or ast.unparse(node.value) == "super()":
            used.add(node.attr)
    return sorted(used - own - _given_by(eagle_worker_class()))


def _given_by(cls):
    # Class attributes, and what any method of the class assigns to itself.
    given = set(dir(cls))
    for base in inspect.getmro(cls)[:-1]:
        given |= {
            node.attr
            for node in ast.walk(ast.parse(inspect.getsource(base).lstrip()))
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
            if isinstance(node.ctx, ast.Store)
        }
    return given


def find_unanswered():
    """Questions that SGLang may ask an algorithm and ours has no answer to."""
    from sgl_eagle.plugin.algorithm import SglEagleAlgorithm
    from sgl_eagle.plugin.compat import speculative_algorithms

    asked = {
        name
        for name, member in vars(speculative_algorithms()).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }
    return sorted(asked - set(dir(SglEagleAlgorithm)))


def version():
    """The release that runs."""
    import sglang

    from sgl_eagle.plugin.compat import sglang_version

    return [sglang_version(), sglang.__version__]
