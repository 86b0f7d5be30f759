"""The documents' programs run, and their commands have the flags and configs named.

A block that no test can run has a comment in front, with the reason:
`<!-- not run: needs a cluster -->`; one that another test runs names it:
`<!-- run by tests/x_test.py -->`.
"""

import dataclasses
import json
import pathlib
import re
import shlex
import sys
from unittest import mock

from absl.testing import parameterized

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib
from tests import environment
from tests.model import tiny

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path
    for pattern in (*("*.md", "pallas_kernels/*.md", "docs/*.md"), "docs/*/*.md")
    for path in sorted(ROOT.glob(pattern))
    # The log says what was run; the kernels' reference is made of signatures.
    if path.name not in ("CHANGELOG.md", "log.md", "kernels_reference.md")
    and path.parent.name not in ("reports", "reference")
}
BLOCK = re.compile(
    r"(?:^<!-- ([^\n]*) -->\n)?^ *```([^\n]*)\n(.*?)^ *```$", re.M | re.S
)
LANGUAGES = {"python", "bash", "json", "text"}
# Stands for a preset's model: what the page says takes less time with it.
SMALL = tiny.model(
    vocab_size=320,
    num_hidden_layers=1,
    num_nextn_predict_layers=0,
    attention="dense",
)
PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b|\.\.\.|\$")
SHARED_FLAGS = {"compile_cache", "help", "verbosity"}
MODEL_ONLY = {
    "generate",
    "evaluate",
    "convert",
    "quantize",
    "serve",
}  # their config comes with the weights


def blocks(path, language):
    """The texts of a page in a language, but for those that it says are not run."""
    for note, name, text in BLOCK.findall(path.read_text(encoding="utf-8")):
        if name == language and not note:
            yield text


def commands(path):
    """The commands of a page after `python -m`, continued lines joined."""
    text = path.read_text(encoding="utf-8")
    spans = re.findall(r"(?<!`)`([^`\n]*python -m [^`]*)`(?!`)", text)
    for block in [*spans, *blocks(path, "bash")]:
        for line in block.replace("\\\n", " ").replace("\\|", "|").splitlines():
            for part in re.split(r"&&|;|\|(?!\w)", line.split("  #")[0]):
                if found := re.search(r"python -m ((?:glm5_jax|pallas)\S*)(.*)", part):
                    yield found[1], found[2]


def module_file(name):
    path = ROOT.joinpath(*name.split("."))
    found = [path.with_suffix(".py"), path / "__main__.py"]
    return next((file for file in found if file.is_file()), None)


def flags_of(file):
    """Names that a command's own file defines, and the modules it adopts flags of."""
    text = file.read_text(encoding="utf-8")
    defined = r'(?:DEFINE_\w+|add|OptionalEnum)\(\s*(?:\*\()?"(?:--)?(\w+)"'
    names = set(re.findall(defined, text))
    adopted = re.findall(r"adopt_module_key_flags\((\w+)\)", text)
    for several in re.findall(r"for module in \(([\w, ]+)\):", text):
        adopted += several.split(", ")
    for module in adopted:
        if renamed := re.search(rf"import (\w+) as {module}\b", text):
            module = renamed[1]
        for path in (ROOT / "glm5_jax").rglob(f"{module}.py"):
            names |= set(re.findall(defined, path.read_text(encoding="utf-8")))
    if "PrepareConfig" in text:  # prepare has a flag a field
        names |= {field.name for field in dataclasses.fields(config_lib.PrepareConfig)}
    return names


class BlocksTest(parameterized.TestCase):
    @parameterized.parameters(*PAGES)
    def test_every_block_names_its_language(self, name):
        for note, language, text in BLOCK.findall(PAGES[name].read_text("utf-8")):
            if language.startswith("{"):  # a directive of the site
                continue
            self.assertIn(language, LANGUAGES, text)
            if note:
                self.assertRegex(note, "^(not run: .+|run by tests/.+)")
            if found := re.search(r"run by (\S+)", note):
                test = (ROOT / found[1]).read_text(encoding="utf-8")
                self.assertIn(PAGES[name].name, test)
        for text in blocks(PAGES[name], "json"):
            for line in text.splitlines():
                json.loads(line)

    @parameterized.parameters(
        name for name, path in PAGES.items() if any(blocks(path, "python"))
    )
    def test_programs_run(self, name):
        small = dict.fromkeys(presets.MODELS, SMALL)
        names = {"__name__": "__main__"}
        with (
            mock.patch.dict(presets.MODELS, small),
            mock.patch("builtins.print"),
        ):
            for text in blocks(PAGES[name], "python"):
                exec(compile(text, name, "exec"), names)

    @parameterized.parameters(*PAGES)
    def test_commands_have_these_flags_and_configs(self, name):
        for module, rest in commands(PAGES[name]):
            file = module_file(module.rstrip(".,;:"))
            if PLACEHOLDER.search(module):
                continue
            self.assertIsNotNone(file, module)
            known = flags_of(file) | SHARED_FLAGS
            given = re.findall(r"--([\w.]+)", rest)
            for flag in given:
                if flag.partition(".")[0] != "config":
                    self.assertIn(flag, known, rest)
            self._check_config(module, rest)

    def _check_config(self, module, rest):
        """Resolves a command's config where the page names one."""
        is_example = PLACEHOLDER.search(rest) or "[" in rest or "(" in rest
        if "--config=" not in rest or is_example:
            return
        argv = [arg for arg in shlex.split(rest) if arg.startswith("--config")]
        arguments, _ = command_line.parse_command_line(["x", *argv])
        with mock.patch.object(sys, "path", [*sys.path]):
            arguments.train_config()

    @parameterized.parameters(*PAGES)
    def test_extras_are_there(self, name):
        setup = (ROOT / "setup.py").read_text() + (
            ROOT / "pallas_kernels/pyproject.toml"
        ).read_text()
        text = PAGES[name].read_text(encoding="utf-8")
        for group in re.findall(
            r"pip install [^`\n]*(?:\.|_jax|_kernels)\[([\w,]+)\]", text
        ):
            for extra in group.split(","):
                self.assertRegex(setup, rf'(?m)^\s*"?{extra}"? ?[:=]', extra)


if __name__ == "__main__":
    environment.main()
