"""Recipes of Ruby, PHP, Java and Go, whose tests run with what Debian installs."""

import re
from collections.abc import Iterator

from glm5_jax.environments.worlds.swe import kinds, records

_RUBY_CANARY = """{framework}
Dir['lib/*.rb'].sort.first(8).each do |file|
  begin
    require File.expand_path(file)
  rescue Exception
  end
end

class CanaryOfTheRunner < {case}
  def test_that_must_fail
    assert_equal 1, 2
  end
end
"""
_RUBY_CASES = {
    "minitest/autorun": "Minitest::Test",
    "test/unit": "Test::Unit::TestCase",
}
_PHP_CANARY = """<?php
foreach ([{classes}] as $class) {
    try {
        class_exists($class);
    } catch (Throwable $error) {
    }
}

final class canary_of_the_runner extends PHPUnit\\Framework\\TestCase
{
    public function testThatMustFail(): void
    {
        $this->assertSame(1, 2);
    }
}
"""
_JAVA_CANARY = """public class canary_of_the_runner {
    @org.junit.Test
    public void mustFail() {
        for (String name : new String[] {{classes}}) {
            try {
                Class.forName(name);
            } catch (Throwable error) {
            }
        }
        org.junit.Assert.assertEquals(1, 2);
    }
}
"""
_GO_CANARY = """package canary

import (
\t"testing"

{packages}
)

func TestCanaryOfTheRunner(t *testing.T) {
\tt.Fatal("must fail")
}
"""
_JAVA_ROOTS = (
    ("src/main/java", "src/test/java"),
    ("src/java", "src/test"),
    ("src", "test"),
)
_MAX_LOADED = 8  # files of a package that its canary loads


def _ruby(files: records.Files) -> Iterator[records.Recipe]:
    known = {p: t for p, t in files.items() if p.endswith(".rb") and kinds.is_test(p)}
    tests = [
        path
        for path in sorted(known)
        if re.search(r"(?:^|/)(?:test_|tc_)[^/]*\.rb$|_test\.rb$", path)
        and "helper" not in path.rpartition("/")[2]
        and not kinds.is_beside(path)
    ]
    if not tests or not any(path.startswith("lib/") for path in files):
        return
    text = b"".join(known.values())
    is_minitest = re.search(rb"minitest|Minitest|MiniTest", text)
    framework = "minitest/autorun" if is_minitest else "test/unit"
    canary = _RUBY_CANARY.replace("{framework}", f"require '{framework}'")
    folders = sorted({path.split("/")[0] for path in tests})
    yield records.Recipe(
        language="ruby",
        runner="ruby",
        parser="ruby",
        files=tuple(tests),
        roots=("lib", *folders, "."),
        guards=kinds.GUARDS["ruby"],
        canary=canary.replace("{case}", _RUBY_CASES[framework]),
    )


def _php(files: records.Files) -> Iterator[records.Recipe]:
    tests = [
        path
        for path in sorted(files)
        if path.endswith("Test.php")
        and re.search(rb"^(?:final )?class \w+\s+extends", files[path], re.MULTILINE)
        and not {"vendor", "debian"} & set(path.split("/"))
    ]
    if not tests:
        return
    classes = [
        name
        for path in sorted(files)
        if path.endswith(".php") and not kinds.is_test(path) and path not in tests
        if (name := _php_class(files[path]))
    ]
    named = ", ".join(f"'{name}'" for name in classes[:_MAX_LOADED])
    yield records.Recipe(
        language="php",
        runner="phpunit",
        parser="testdox",
        files=tuple(tests),
        guards=kinds.GUARDS["php"],
        canary=_PHP_CANARY.replace("{classes}", named),
    )


def _php_class(text: bytes) -> str:
    """Returns the name of the first class of a file, "" if it has none."""
    space = re.search(rb"^\s*namespace\s+([\w\\]+)", text, re.MULTILINE)
    pattern = rb"^\s*(?:final\s+|abstract\s+)*class\s+(\w+)"
    found = re.search(pattern, text, re.MULTILINE)
    parts = [match[1].decode() for match in (space, found) if match and found]
    return "\\".join(parts)


def _java(files: records.Files) -> Iterator[records.Recipe]:
    for main, test in _JAVA_ROOTS:
        sources = [p for p in sorted(files) if re.fullmatch(rf"{main}/.*\.java", p)]
        sources = [p for p in sources if not p.startswith(f"{test}/")]
        tests = [
            path
            for path in sorted(files)
            if re.fullmatch(rf"{test}/.*(?:Test[^/]*|[^/]*Test(?:s|Case)?)\.java", path)
            and re.search(rb"org\.junit\.|junit\.framework\.", files[path])
            and b"org.junit.jupiter" not in files[path]
            and not re.search(rb"\babstract class\b", files[path])
        ]
        if not sources or not tests:
            continue
        known = [_java_class(path, main) for path in sources[:_MAX_LOADED]]
        named = ", ".join(f'"{name}"' for name in known)
        yield records.Recipe(
            language="java",
            runner="junit",
            parser="tap",
            files=tuple(tests),
            roots=(main, test),
            guards=kinds.GUARDS["java"],
            canary=_JAVA_CANARY.replace("{classes}", named),
        )
        return


def _java_class(path: str, root: str) -> str:
    return path.removeprefix(f"{root}/").removesuffix(".java").replace("/", ".")


def _go(files: records.Files) -> Iterator[records.Recipe]:
    found = re.search(rb"^module\s+(\S+)", files.get("go.mod", b""), re.MULTILINE)
    tests = [
        path
        for path in sorted(files)
        if path.endswith("_test.go") and b"func Test" in files[path]
    ]
    if not tests:
        return
    module = found[1].decode().strip('"') if found else "example.org/package"
    loaded = {
        path.rpartition("/")[0]
        for path, text in files.items()
        if path.endswith(".go")
        and not kinds.is_test(path)
        and not kinds.is_beside(path)
        and "internal" not in path
        and not re.search(rb"^package main\b", text, re.MULTILINE)
    }
    if not loaded:
        return
    paths = [f"{module}/{folder}".rstrip("/") for folder in sorted(loaded)]
    named = "\n".join(f'\t_ "{path}"' for path in paths[:_MAX_LOADED])
    yield records.Recipe(
        language="go",
        runner="go",
        parser="go",
        files=tuple(tests),
        roots=(module,),
        guards=kinds.GUARDS["go"],
        canary=_GO_CANARY.replace("{packages}", named),
    )


FINDERS = (_ruby, _php, _java, _go)
