"""A parsed source file: what its names stand for, and which of its functions may be compiled.

Some patterns matter anywhere (`torch.linalg.svd`), others only where a graph is traced (`.item()`).
Compiled are `forward` of modules, what is given to `torch.compile` in the same file, and the
functions of the file that those call.
"""

import ast

from carbon_compile.diagnostics import Diagnostic

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Source:
    """A parsed file. SyntaxError where it isn't Python.

    names: what each imported name stands for. parent: a node's parent. compiled: the functions
    that are, or may be, traced into a graph. disabled: names of functions kept from being traced.
    """

    def __init__(self, text: str, file: str = "<source>"):
        self.text, self.file = text, file
        self.tree = ast.parse(text, file)
        self.nodes = list(ast.walk(self.tree))
        self.parent = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.names = _imports(self.nodes)
        self.functions = {node.name: node for node in self.nodes if isinstance(node, FUNCTIONS)}
        self.disabled = {name for name, node in self.functions.items() if is_disabled(self, node)}
        self.compiled = _compiled_functions(self)

    def name(self, node: ast.AST | None) -> str:
        """"torch.linalg.svd" of an expression that names it, through imports; "" for any other."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.names.get(node.id, node.id), *reversed(parts)])

    def is_compiled(self, node: ast.AST) -> bool:
        """Whether a node lies in a compiled function, and not under `if not is_compiling():`."""
        while node not in self.compiled:
            parent = self.parent.get(node)
            if parent is None or (isinstance(parent, ast.If) and node in parent.body and self._is_eager(parent.test)):
                return False
            node = parent
        return True

    def _is_eager(self, test):
        negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        return negated and isinstance(test.operand, ast.Call) and self.name(test.operand.func).endswith("is_compiling")

    def finding(self, code: str, node: ast.AST, op: str = "", detail: str = "") -> Diagnostic:
        line = node.lineno
        return Diagnostic(code, detail, op, self.file, line, self.text.splitlines()[line - 1].strip())


def _imports(nodes):
    names = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


def _compiled_functions(source: Source) -> set[ast.AST]:
    found = set(_forwards(source)) | set(_given_to_compile(source))
    waiting = list(found)
    while waiting:
        for called in _called(source, waiting.pop()):
            if called not in found and not is_disabled(source, called):
                found.add(called)
                waiting.append(called)
    return found


def _forwards(source):
    modules: set[str] = set()
    classes = [node for node in source.nodes if isinstance(node, ast.ClassDef)]
    for _ in classes:  # as often as a chain of base classes can be long
        modules |= {c.name for c in classes if any(_names_module(source, base, modules) for base in c.bases)}
    for node in classes:
        if node.name in modules:
            yield from (f for f in node.body if isinstance(f, FUNCTIONS) and f.name == "forward")


def _names_module(source, base, modules):
    name = source.name(base)
    return name in modules or name.rpartition(".")[2].endswith("Module")


def _given_to_compile(source):
    for node in source.nodes:
        if isinstance(node, ast.Call) and source.name(node.func) == "torch.compile" and node.args:
            given = node.args[0]
            if isinstance(given, ast.Lambda):
                yield given
            elif isinstance(given, ast.Name) and given.id in source.functions:
                yield source.functions[given.id]
        elif isinstance(node, FUNCTIONS) and "torch.compile" in decorators(source, node):
            yield node


def _called(source, function):
    owner = source.parent.get(function)
    methods = {f.name: f for f in getattr(owner, "body", ()) if isinstance(f, FUNCTIONS)}
    for node in ast.walk(function):
        name = source.name(node.func) if isinstance(node, ast.Call) else ""
        if name in source.functions:
            yield source.functions[name]
        elif name.startswith("self.") and name[5:] in methods:
            yield methods[name[5:]]


_DISABLE = ("torch.compiler.disable", "torch._dynamo.disable")


def decorators(source: Source, function: ast.AST) -> list[str]:
    """Dotted names of a function's decorators, called or not."""
    return [source.name(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list]


def is_disabled(source: Source, function: ast.AST) -> bool:
    """Whether `torch.compiler.disable` keeps a function from being traced."""
    return any(name in _DISABLE for name in decorators(source, function))
