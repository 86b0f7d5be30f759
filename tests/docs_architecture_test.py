"""The documents' pictures and the reading track are those of the code as it stands."""

import ast
import importlib.util
import json
import pathlib
import re

from absl.testing import absltest

from tests import environment

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
MAX_TRACK_LINES = 610  # 25 minutes, at 24 lines a minute
TRACK_ENTRY = re.compile(r"\d+\. `([\w/.]+)`(?: \(([\w`., ]+)\))?: .+\.")


def lines_to_read(path, names):
    """Counts the lines of a file's header and of what it defines by the given names.

    A method is CLASS.METHOD. Without names it counts the whole file.
    """
    text = path.read_text(encoding="utf-8")
    if not names:
        return text.count("\n")
    body = ast.parse(text).body
    sizes = {}
    for node in body:
        name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
        sizes[getattr(node, "name", name)] = node.end_lineno - node.lineno + 1
        for method in getattr(node, "body", []):
            if isinstance(node, ast.ClassDef) and isinstance(method, ast.FunctionDef):
                lines = method.end_lineno - method.lineno + 1
                sizes[f"{node.name}.{method.name}"] = lines
    return body[0].end_lineno + sum(sizes[name] for name in names)


class ArchitectureTest(absltest.TestCase):
    def test_the_picture_is_of_these_imports(self):
        path = DOCS / "figures" / "architecture.py"
        spec = importlib.util.spec_from_file_location("architecture", path)
        architecture = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(architecture)
        parts = architecture.graph(ROOT)
        renew = "Imports have changed: run python docs/figures/architecture.py"
        self.assertEqual(
            json.loads((DOCS / "architecture.json").read_text()), parts, renew
        )
        drawn = (DOCS / "architecture.svg").read_text(encoding="utf-8")
        self.assertEqual(drawn, architecture.svg(parts), renew)

    def test_every_part_has_its_line(self):
        text = (DOCS / "architecture.md").read_text(encoding="utf-8")
        parts = json.loads((DOCS / "architecture.json").read_text())
        missing = [p for p, part in parts.items() if part["folders"] and p not in text]
        self.assertEmpty(missing)

    def test_the_figures_of_the_concepts_are_there(self):
        script = (DOCS / "figures" / "draw.py").read_text(encoding="utf-8")
        for page in sorted((DOCS / "concepts").glob("*.md")):
            self.assertIn(f'"{page.stem}": ', script)
            self.assertIn(f"(../figures/{page.stem}.png)", page.read_text("utf-8"))

    def test_the_track_is_short(self):
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        track = readme.partition("<!-- track -->")[2]
        track = track.partition("<!-- end of track -->")[0]
        items = [line for line in track.splitlines() if line]
        entries = [TRACK_ENTRY.fullmatch(line) for line in items]
        self.assertNotIn(None, entries, "a file a line, its functions, one sentence")
        sizes = {
            entry[1]: lines_to_read(
                ROOT / entry[1], re.findall("[\\w.]+", entry[2] or "")
            )
            for entry in entries
        }
        self.assertLessEqual(sum(sizes.values()), MAX_TRACK_LINES, sizes)


if __name__ == "__main__":
    environment.main()
