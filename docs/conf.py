"""The site's settings: python -m sphinx -W --keep-going -j auto docs build/site."""

import pathlib
import re
import sys

from docutils import nodes
from docutils.utils import math
from docutils.utils.math import latex2mathml
from sphinx import application
from sphinx.util import logging
from sphinx.writers import html5

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from glm5_jax import __main__ as commands  # noqa: E402  it is found by the path above

project = "glm5_jax"
html_title = "glm5_jax"
html_theme = "furo"
html_math_renderer = "mathml"
html_static_path, html_css_files = ["_static"], ["formulas.css"]
html_copy_source = html_show_copyright = False
extensions = [
    "myst_parser",
    "sphinx.ext.apidoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["figures", "reference/**/modules.rst", "reference/modules.rst"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

# The reference: what a program may import. Commands explain themselves by --help;
# processes and scale serve training and planning alone, serving answers over HTTP.
_HIDDEN = (
    "processes",
    "scale",
    "serving",
    "__main__.py",
    *(f"{c}.py" for c in commands.COMMANDS),
)
apidoc_modules = [
    {
        "path": "../glm5_jax",
        "destination": "reference",
        "exclude_patterns": [f"../glm5_jax/{name}" for name in _HIDDEN],
        "module_first": True,
        "automodule_options": {"members"},
    },
    {
        "path": "../pallas_kernels",
        "destination": "reference/kernels",
        "exclude_patterns": [
            "../pallas_kernels/*/[a-z]*",
            "../pallas_kernels/[a-z]*.py",
        ],
        "module_first": True,
        "automodule_options": {"members"},
    },
]
autodoc_typehints = "signature"
napoleon_use_ivar = True
autodoc_preserve_defaults = True
# Each page shows the tree of all pages: with every function in it, writing the site
# took twice as long.
toc_object_entries = False
autodoc_mock_imports = ["harbor", "lm_eval", "math_verify"]  # not installed
# A name that two modules have (config.DamagedError is checks.DamagedError) is no error.
suppress_warnings = ["ref.python"]

_LOGGER = logging.getLogger(__name__)
_MARKUP = re.compile(r"``|:math:|^ *\.\. \w+::")
_SECTION = re.compile(
    r"(Args|Attributes|Raises|Returns|Yields|References?|Examples?):$"
)


def plain_docstring(
    app: application.Sphinx,
    kind: str,
    name: str,
    obj: object,
    options: object,
    lines: list[str],
) -> None:
    """Rewrites a docstring, which is plain text, as what Sphinx parses.

    `code` stays code, other marks are what they are, and an indented paragraph that no
    section explains keeps its line breaks.
    """
    if any(_MARKUP.search(line) for line in lines):
        return  # it is reStructuredText already
    in_section, was_indented, new = False, False, []
    for line in lines:
        is_indented = line.startswith(" ")
        if line and not is_indented:
            in_section = bool(_SECTION.match(line))
        if is_indented and not in_section:
            if not was_indented:
                new += ["", "::", ""]
            new.append(line)
        else:
            if was_indented and not in_section and line:
                new.append("")
            new.append(_escaped(line))
        was_indented = (is_indented or (was_indented and not line)) and not in_section
    lines[:] = new


def _escaped(line: str) -> str:
    """Doubles the quotes of code, and takes other marks for what they are."""
    parts = re.split(r"`([^`]+)`", line)
    parts[::2] = [re.sub(r"([*|\\`]|_(?!\w))", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [f"``{code}``\\ " for code in parts[1::2]]
    return "".join(parts)


def mathml(writer: html5.HTML5Translator, node: nodes.Element, block: bool) -> None:
    """Writes a formula in the markup that browsers draw by themselves."""
    tex = node.astext()
    if r"\\" in tex and r"\begin" not in tex:
        tex = rf"\begin{{aligned}}{tex}\end{{aligned}}"
    try:
        writer.body.append(latex2mathml.tex2mathml(tex, as_block=block))
    except math.MathError as error:
        _LOGGER.warning("%s in %r", error, tex, location=node)
    raise nodes.SkipNode


def setup(app: application.Sphinx) -> None:
    """Adds both to the site."""
    app.connect("autodoc-process-docstring", plain_docstring, priority=100)
    app.add_html_math_renderer(
        "mathml",
        (lambda writer, node: mathml(writer, node, block=False), None),
        (lambda writer, node: mathml(writer, node, block=True), None),
    )
