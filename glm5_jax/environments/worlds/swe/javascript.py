"""Recipes of JavaScript and TypeScript: Node, and the runners that npm brings.

TypeScript is not checked, only stripped of its types as it is loaded (tsx), so that a
break that a compiler would refuse is a break of a run. Tests written for Jest or Vitest
run with mocha, which runner/mocha_ui.cjs gives their functions; mocks and snapshots it
does not.
"""

import json
import re
from collections.abc import Iterator

from glm5_jax.environments.worlds.swe import kinds, records

_TESTS = re.compile(rb"assert|node:test|tape|\b(?:describe|it|test|expect)\s*\(")
_CASES = re.compile(rb"^\s*(?:describe|it|test|context)(?:\.\w+)*\s*\(", re.MULTILINE)
_TAPE = re.compile(rb"""['"]tape['"]""")
_MAX_LOADED = 8  # files of a package that its canary loads
_CANARY = """for (const path of {paths}) {{
  try {{ await import(`/work/repo/${{path}}`); }} catch {{}}
}}
{test}
"""
_OF_MOCHA = "it('must fail', () => { throw new Error('must fail'); });"
_ALONE = "throw new Error('must fail');"
_CANARY_OF_REQUIRE = (
    "try { require('/work/repo'); } catch (e) {}\nrequire('assert')(false);\n"
)


def find(files: records.Files) -> Iterator[records.Recipe]:
    """Yields recipes for a package with a package.json, the likeliest first."""
    if "package.json" not in files:
        return
    for language in ("typescript", "javascript"):
        tests = {
            path: files[path]
            for path in sorted(files)
            if path.endswith(kinds.ENDINGS[language])
            and not path.endswith(kinds.DECLARATIONS)
            and kinds.is_test(path)
            and not kinds.is_beside(path)
            and _TESTS.search(files[path])
        }
        if not tests:
            continue
        for runner in _runners(b"".join(tests.values()), language):
            yield records.Recipe(
                language=language,
                runner=runner,
                parser="tap",
                files=tuple(tests),
                guards=kinds.GUARDS[language],
                canary=_canary(files, language, runner),
            )


def _runners(text: bytes, language: str) -> Iterator[str]:
    """Yields the runners that tests may be written for."""
    if b"node:test" in text:
        yield "node-test"
    elif _TAPE.search(text) and language == "javascript":
        yield "tape"
    else:
        if _CASES.search(text):
            yield "mocha"
        yield "node"


def _canary(files: records.Files, language: str, runner: str) -> str:
    """Returns a test that loads the package and fails."""
    if language == "javascript" and runner != "mocha":
        return _CANARY_OF_REQUIRE
    paths = [
        path
        for path in files
        if path.endswith(kinds.ENDINGS[language])
        and not path.endswith(kinds.DECLARATIONS)
        and not kinds.is_test(path)
        and not kinds.is_beside(path)
    ]
    paths.sort(key=lambda path: (len(path), path))
    test = _OF_MOCHA if runner == "mocha" else _ALONE
    return _CANARY.format(paths=json.dumps(paths[:_MAX_LOADED]), test=test)
