"""The names in the documents exist: commands, modules, files of the repository."""

import pathlib
import re

from absl.testing import parameterized

from tests import environment

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path
    for pattern in ("*.md", "pallas_kernels/*.md", "docs/*.md", "docs/*/*.md")
    for path in sorted(ROOT.glob(pattern))
    # They name what there was.
    if path.name not in ("CHANGELOG.md", "log.md")
    and path.parent.name not in ("reports", "reference", "design")
}
FOLDERS = "glm5_jax|pallas_kernels|configs|docs|launch|benchmarks|tests|colab"


class DocumentsTest(parameterized.TestCase):
    @parameterized.parameters(*PAGES)
    def test_commands_and_links_lead_somewhere(self, page):
        path = PAGES[page]
        text = path.read_text(encoding="utf-8")
        for name in re.findall(
            r"python -m ((?:glm5_jax|pallas_kernels)[a-z_.]*)", text
        ):
            module = ROOT.joinpath(*name.rstrip(".").split("."))
            found = [module.with_suffix(".py"), module / "__main__.py", module]
            self.assertTrue(any(p.exists() for p in found), name)
        for name in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if not name.startswith("http"):
                self.assertTrue((path.parent / name).exists(), name)
        for name in re.findall(r"--config=(configs/\w+\.py)", text):
            self.assertTrue((ROOT / name).exists() or "NAME" in name, name)

    @parameterized.parameters(*PAGES)
    def test_files_in_the_text_are_there(self, page):
        text = PAGES[page].read_text(encoding="utf-8")
        for name in re.findall(rf"`((?:{FOLDERS})/[\w./*]+)`", text):
            is_made = name.startswith(("docs/reference", "configs/NAME"))
            self.assertTrue(is_made or any(ROOT.glob(name.rstrip("/"))), name)

    @parameterized.parameters(*PAGES)
    def test_tests_that_are_named_are_there(self, page):
        text = PAGES[page].read_text(encoding="utf-8")
        for file, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", text):
            code = (ROOT / file).read_text(encoding="utf-8")
            self.assertRegex(code, rf"\n    (async )?def {name}\(", file)

    def test_every_fault_has_its_tests(self):
        text = (ROOT / "docs" / "faults_rl.md").read_text(encoding="utf-8")
        rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", text, re.MULTILINE)
        rows = [row for row in rows if row[2] != "tests"]
        self.assertLen(rows, 17 + 17)  # faults, and complaints
        untested = [what for what, _, tests in rows if "::test_" not in tests]
        self.assertEmpty(untested)

    def test_every_finding_has_its_test_or_a_reason(self):
        text = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
        rows = re.findall(r"^\| (.+?) \| (.*) \|$", text, re.MULTILINE)
        rows = [row for row in rows if row[0] not in ("found", "---")]
        self.assertGreater(len(rows), 380)
        self.assertEqual([what for what, held in rows if not held.strip()], [])

    def test_every_word_of_the_glossary_has_one_line(self):
        text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
        words = re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE)
        words = [(word, what) for word, what in words if word != "word"]
        self.assertLen({word for word, _ in words}, len(words))
        for word, what in words:
            self.assertRegex(what, r"\.$", word)
            self.assertNotRegex(what, r"\. [A-Z]", f"{word}: one sentence")


if __name__ == "__main__":
    environment.main()
