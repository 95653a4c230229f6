"""What the models of the installed transformers pass to their attention, read in their sources."""

import ast
from collections import defaultdict
from pathlib import Path

import transformers

from kvpact.integrations.transformers.versions import CACHE

_INTERFACES = "ALL_ATTENTION_FUNCTIONS"
_MODELS = Path(transformers.__file__).parent / "models"
_ATTENTION = object()


def attention_arguments():
    """Return the arguments that calls of attention bring, ``**kwargs`` too, with their models."""
    found = defaultdict(set)
    for path in sorted(_MODELS.glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if _INTERFACES in text and f"{CACHE}.update(" in text:
            for name in _passed(ast.parse(text)):
                found[name].add(path.parent.name)
    return dict(found)


def _passed(tree):
    """Return the names of what reaches attention functions from the modules of a file."""
    forward = {
        node.name: method
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "forward"
    }
    open_to = {  # modules that take arguments by any name, and those that they know
        name: {x.arg for x in (*method.args.args, *method.args.kwonlyargs)}
        for name, method in forward.items()
        if method.args.kwarg is not None
    }
    calls = [
        (node.name, call)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in forward
        for call in _calls(node, forward[node.name], open_to)
    ]
    taken = {name: set() for name in open_to} | {_ATTENTION: set()}
    open_to[_ATTENTION] = set()
    before = None
    while before != (before := sum(map(len, taken.values()))):
        for caller, (callee, brought, spread) in calls:
            passed_on = taken.get(caller, set()) if spread else set()
            taken[callee] |= (brought | passed_on) - open_to[callee]
    return taken[_ATTENTION]


def _calls(module, forward, classes):
    """Yield what a module calls in its forward pass: class, names brought, and if ``**kwargs``."""
    parts = defaultdict(set)
    for node in ast.walk(module):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        named = {x.id for x in ast.walk(node.value) if isinstance(x, ast.Name)}
        if isinstance(target, ast.Attribute):
            parts[target.attr] |= named & set(classes)
        elif isinstance(target, ast.Name) and _INTERFACES in named:
            parts[target.id].add(_ATTENTION)
    nodes = list(ast.walk(forward))
    for loop in (node for node in nodes if isinstance(node, ast.For)):
        for target in ast.walk(loop.target):
            if isinstance(target, ast.Name):
                parts[target.id] |= _named(loop.iter, parts)
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        for callee in _named(call.func, parts):
            brought = {x.arg for x in call.keywords if x.arg is not None}
            yield callee, brought, len(brought) < len(call.keywords)


def _named(node, parts):
    """Return the classes of what an expression names."""
    names = [getattr(x, "attr", None) or getattr(x, "id", None) for x in ast.walk(node)]
    return set().union(*(parts.get(name, set()) for name in names))
