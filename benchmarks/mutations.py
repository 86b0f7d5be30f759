"""Draws single edits of the package's source files, for benchmarks/mutants.py."""

import ast
import copy
import dataclasses
import itertools
import pathlib
import random
from collections.abc import Iterator

SOURCES = (
    "glm5_jax/model",
    "glm5_jax/losses.py",
    "glm5_jax/optim",
    "glm5_jax/checkpoint",
    "glm5_jax/data",
    "glm5_jax/environments/protocol.py",
    "glm5_jax/environments/tasks",
    "glm5_jax/rl",
    "glm5_jax/weights",
    "glm5_jax/inference",
    "pallas_kernels",
)
# Triton's kernels need Triton: .ci/run tests them in an environment of its own.
EXCLUDED = ("gpu", "triton_call", "/bench/", "aot.py", "cases.py")
PAIRS = (
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.And, ast.Or),
    (ast.BitAnd, ast.BitOr),
    (ast.FloorDiv, ast.Mod),
)
SWAPPED = {a: b for x, y in PAIRS for a, b in ((x, y), (y, x))}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """An edit of a file."""

    file: str
    line: int
    statement: range  # lines of the innermost statement, without its body
    what: str
    source: str  # the whole file, edited


def draw(tree: pathlib.Path, seed: int, count: int) -> Iterator[Mutant]:
    """Yields mutants: a file by its lines, then one of its edits."""
    rng = random.Random(seed)
    files = {path: path.read_text() for path in _files(tree)}
    weights = [text.count("\n") for text in files.values()]
    seen = set()
    while len(seen) < count:
        (path,) = rng.choices(list(files), weights)
        parsed = ast.parse(files[path])
        edits = list(_edits(parsed))
        index = rng.randrange(len(edits)) if edits else None
        if index is None or (path, index) in seen:
            continue
        seen.add((path, index))
        node, new = edits[index]
        lines = files[path].splitlines(keepends=True)
        starts = [0, *itertools.accumulate(len(line.encode()) for line in lines)]
        text = files[path].encode()
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[node.end_lineno - 1] + node.end_col_offset
        old = text[first:last].decode()
        yield Mutant(
            file=path.relative_to(tree).as_posix(),
            line=node.lineno,
            statement=_statement(parsed, node),
            what=f"{' '.join(old.split())} -> {new}",
            source=(text[:first] + new.encode() + text[last:]).decode(),
        )


def _files(tree: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that mutants are drawn from."""
    found = []
    for source in SOURCES:
        path = tree / source
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    names = [(p, p.relative_to(tree).as_posix()) for p in found]
    return [p for p, name in names if not any(word in name for word in EXCLUDED)]


def _edits(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yields nodes and the text that breaks them."""
    silent = _silent(tree)
    for node in ast.walk(tree):
        if id(node) in silent:
            continue
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test, f"(not ({ast.unparse(node.test)}))"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "pass"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield node, f"({ast.unparse(node.operand)})"
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
            value = node.value
            yield node, repr(not value if isinstance(value, bool) else value + 1)
        else:
            yield from _operators(node)


def _operators(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yields the node with another operator, if it has one."""
    new = copy.copy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        new.ops = [SWAPPED[type(node.ops[0])](), *node.ops[1:]]
        yield node, f"({ast.unparse(new)})"
    elif type(getattr(node, "op", None)) in SWAPPED:
        new.op = SWAPPED[type(node.op)]()
        text = ast.unparse(new)
        yield node, text if isinstance(node, ast.AugAssign) else f"({text})"


def _silent(tree: ast.AST) -> set[int]:
    """Returns the nodes that no test should notice: annotations, messages, logs."""
    found = set()
    for node in ast.walk(tree):
        values = [node] if isinstance(node, ast.JoinedStr) or _is_log(node) else []
        if isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__"):
            values.append(node)
        if isinstance(node, ast.keyword) and node.arg == "strict":
            values.append(node.value)  # zip's assertion, which holds
        for field in ("annotation", "returns", "decorator_list", "exc", "msg"):
            value = getattr(node, field, None)
            values += value if isinstance(value, list) else [value]
        for value in values:
            if isinstance(value, ast.AST):
                found.update(map(id, ast.walk(value)))
    return found


def _is_log(node: ast.AST) -> bool:
    """Returns whether the node is a call of absl's logging."""
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return is_call and ast.unparse(node.value.func).startswith("logging.")


def _statement(tree: ast.AST, node: ast.AST) -> range:
    """Returns the lines of the innermost statement around a node."""
    around = [
        s
        for s in ast.walk(tree)
        if isinstance(s, ast.stmt) and s.lineno <= node.lineno <= s.end_lineno
    ]
    inner = min(around, key=lambda s: (s.end_lineno - s.lineno, -s.col_offset))
    body = getattr(inner, "body", None)
    end = max(inner.lineno, body[0].lineno - 1) if body else inner.end_lineno
    return range(inner.lineno, end + 1)
