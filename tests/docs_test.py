"""What the documents name is there: commands, modules, files of the repository."""

import pathlib
import re

from absl.testing import parameterized

from tests import environment

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
    if path.name != "log.md"  # it names what there was
)


class DocumentsTest(parameterized.TestCase):
    @parameterized.named_parameters((path.stem, path) for path in DOCUMENTS)
    def test_commands_and_links_lead_somewhere(self, path):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"python -m ((?:glm5_jax|pallas_kernels)[\w.]*)", text):
            module = ROOT.joinpath(*name.rstrip(".").split("."))
            found = [module.with_suffix(".py"), module / "__main__.py"]
            self.assertTrue(any(p.is_file() for p in found), name)
        for name in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if not name.startswith("http"):
                self.assertTrue((path.parent / name).exists(), name)
        for name in re.findall(r"--config=(configs/\w+\.py)", text):
            self.assertTrue((ROOT / name).exists() or "NAME" in name, name)


if __name__ == "__main__":
    environment.main()
