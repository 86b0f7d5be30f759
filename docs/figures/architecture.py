"""Draws which part of the code imports which: python docs/figures/architecture.py.

Writes docs/architecture.json, read off the import statements, and the drawing of it,
docs/architecture.svg; tests/docs_architecture_test.py holds both to the code. For
another tree `architecture.py TREE NAME` writes NAME.svg.
"""

import ast
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping
from xml.sax import saxutils

ROOT = pathlib.Path(__file__).parents[2]
COMMANDS = "commands"  # one box for all entry points
KERNELS = "pallas_kernels"
GAP, HEIGHT, LETTER, WIDTH = 14, 40, 7.6, 1000

Graph = dict[str, dict[str, list[str]]]


def graph(root: pathlib.Path) -> Graph:
    """Returns the parts of a tree: what each imports, and the folders inside it.

    A part is a folder or a file of glm5_jax; its entry points are one, the kernels one.
    """
    package = root / "glm5_jax"
    tree = ast.parse((package / "__main__.py").read_text(encoding="utf-8"))
    [commands] = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMMANDS"
    ]
    # checkpoint is a command and a part; the package itself imports nothing at once.
    names = {c.value for c in ast.walk(commands) if isinstance(c, ast.Constant)}
    entries = {n for n in names if (package / f"{n}.py").exists()} | {"__main__"}
    parts: Graph = {}
    for path in sorted([*package.rglob("*.py"), *(root / KERNELS).rglob("*.py")]):
        first, *rest = path.relative_to(root).with_suffix("").parts
        if rest == ["__init__"] and first == "glm5_jax":
            continue
        name = first if first == KERNELS else rest[0]
        part = parts.setdefault(_merged(name, entries), {"imports": [], "folders": []})
        if len(rest) > 2 and first != KERNELS:
            part["folders"].append(rest[1])
        for module in _imports(path):
            head, *tail = module.split(".")
            if head == KERNELS or (head == "glm5_jax" and tail):
                target = head if head == KERNELS else _merged(tail[0], entries)
                part["imports"].append(target)
    return {
        name: {
            "imports": sorted(set(part["imports"]) - {name}),
            "folders": sorted(set(part["folders"])),
        }
        for name, part in sorted(parts.items())
    }


def svg(parts: Graph) -> str:
    """Returns the drawing: what imports stands above what is imported.

    An arrow that others imply (A to C beside A to B to C) is not drawn.
    """
    edges = {name: set(part["imports"]) for name, part in parts.items()}
    rows: dict[int, list[str]] = {}
    for name in parts:
        rows.setdefault(_depth(name, edges), []).append(name)
    boxes: dict[str, tuple[float, float, float]] = {}  # left, top, width
    for depth, names in rows.items():
        widths = [max(len(n), _small(parts[n]) * 0.75) * LETTER + 18 for n in names]
        left = (WIDTH - sum(widths) - GAP * (len(names) - 1)) / 2
        top = 10 + (max(rows) - depth) * (HEIGHT + 34)
        for name, width in zip(names, widths, strict=True):
            boxes[name] = (left, top, width)
            left += width + GAP
    bottom = 20 + max(rows) * (HEIGHT + 34) + HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom}" '
        f'font-family="sans-serif" text-anchor="middle">',
        f'<rect width="{WIDTH}" height="{bottom}" fill="white"/>',
    ]
    for name, targets in edges.items():
        implied = set().union(*(_reachable(t, edges) for t in targets))
        x, y, width = boxes[name]
        for target in sorted(targets - implied):
            to_x, to_y, to_width = boxes[target]
            lines.append(
                f'<path d="M{x + width / 2:.0f} {y + HEIGHT} '
                f'L{to_x + to_width / 2:.0f} {to_y}" stroke="#99aabb"/>'
            )
    for name, (x, y, width) in boxes.items():
        lines += _box(name, parts[name]["folders"], x, y, width)
    return "\n".join([*lines, "</svg>", ""])


def main(arguments: list[str]) -> None:
    """Writes the files of this tree, or the drawing of another one."""
    if arguments:
        root, name = arguments
        pathlib.Path(f"{name}.svg").write_text(svg(graph(pathlib.Path(root))))
        return
    parts = graph(ROOT)
    docs = ROOT / "docs"
    (docs / "architecture.json").write_text(json.dumps(parts, indent=1) + "\n")
    (docs / "architecture.svg").write_text(svg(parts), encoding="utf-8")


def _imports(path: pathlib.Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _merged(name: str, entries: set[str]) -> str:
    return COMMANDS if name in entries else name


def _reachable(name: str, edges: Mapping[str, set[str]]) -> set[str]:
    """Returns what a part imports, directly or through others."""
    found: set[str] = set()
    todo = [name]
    while todo:
        new = edges.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


def _depth(name: str, edges: Mapping[str, set[str]]) -> int:
    """Returns the length of the longest chain of imports from a part."""
    below = [t for t in edges[name] if name not in _reachable(t, edges)]
    return 1 + max((_depth(t, edges) for t in below), default=-1)


def _small(part: Mapping[str, list[str]]) -> int:
    return len(" ".join(part["folders"]))


def _box(name: str, folders: list[str], x: float, y: float, width: float) -> list[str]:
    middle, low = x + width / 2, 17 if folders else 25
    lines = [
        f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{HEIGHT}" rx="5" '
        f'fill="#eef3fa" stroke="#3366aa"/>',
        f'<text x="{middle:.0f}" y="{y + low}" font-size="13">'
        f"{saxutils.escape(name)}</text>",
    ]
    if folders:
        lines.append(
            f'<text x="{middle:.0f}" y="{y + 33}" font-size="10" fill="#556677">'
            f"{saxutils.escape(' '.join(folders))}</text>"
        )
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
