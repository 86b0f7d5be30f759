"""Small packages in each language and runner, with tests and one fault.

Each has a function that adds, which is right, and one that takes away, which is
broken; so one run shows both outcomes.
"""

import dataclasses

RUBY = """module Sums
  def self.add(a, b)
    a + b
  end

  def self.take(a, b)
    a + b
  end
end
"""
RUBY_TEST = """require 'minitest/autorun'
require 'sums'

class SumsTest < Minitest::Test
  def test_add
    assert_equal 3, Sums.add(1, 2)
  end

  def test_take
    assert_equal 3, Sums.take(5, 2)
  end

  def test_none
    assert_equal 0, Sums.add(0, 0)
  end
end
"""
PHP = """<?php
namespace Own\\Sums;

class Sums
{
    public static function add($a, $b)
    {
        return $a + $b;
    }

    public static function take($a, $b)
    {
        return $a + $b;
    }
}
"""
PHP_TEST = """<?php
namespace Own\\Sums\\Tests;

use Own\\Sums\\Sums;

class SumsTest extends Base
{
    public function testAdd()
    {
        $this->assertSame(3, Sums::add(1, 2));
    }

    public function testTake()
    {
        $this->assertSame(3, Sums::take(5, 2));
    }

    public function testNone()
    {
        $this->assertSame(0, Sums::add(0, 0));
    }
}
"""
PHP_BASE = """<?php
namespace Own\\Sums\\Tests;

abstract class Base extends \\PHPUnit\\Framework\\TestCase
{
}
"""
JAVA = """package own.cli;

public class Sums {
    public static int add(int a, int b) {
        return a + b;
    }

    public static int take(int a, int b) {
        return a + b;
    }
}
"""
JAVA_TEST = """package own.cli;

import static org.junit.Assert.assertEquals;
import org.junit.Test;

public class SumsTest {
    @Test public void add() {
        assertEquals(3, Sums.add(1, 2));
    }

    @Test public void take() {
        assertEquals(3, Sums.take(5, 2));
    }

    @Test public void none() {
        assertEquals(0, Sums.add(0, 0));
    }
}
"""
GO = """package sums

func Add(a, b int) int {
\treturn a + b
}

func Take(a, b int) int {
\treturn a + b
}
"""
GO_TEST = """package sums

import "testing"

func TestAdd(t *testing.T) {
\tif Add(1, 2) != 3 {
\t\tt.Error("1 + 2")
\t}
}

func TestTake(t *testing.T) {
\tif got := Take(5, 2); got != 3 {
\t\tt.Errorf("5 - 2 = %d", got)
\t}
}

func TestNone(t *testing.T) {
\tif Add(0, 0) != 0 {
\t\tt.Error("0 + 0")
\t}
}
"""
C = """int add(int a, int b) {
    return a + b;
}

int take(int a, int b) {
    return a + b;
}
"""
C_TEST = """#include <stdio.h>

int add(int a, int b);
int take(int a, int b);

static int check(int number, const char *name, int got, int wanted) {
    if (got != wanted)
        printf("# wanted %d, got %d\\n", wanted, got);
    printf("%sok %d - %s\\n", got == wanted ? "" : "not ", number, name);
    return got != wanted;
}

int main(void) {
    int bad = check(1, "add", add(1, 2), 3);
    bad += check(2, "take", take(5, 2), 3);
    return bad + check(3, "none", add(0, 0), 0);
}
"""
CPP_TEST = C_TEST.replace("#include <stdio.h>", "#include <cstdio>\n#include <vector>")
PYTHON = """def add(a, b):
    return a + b


def take(a, b):
    return a + b
"""
PYTEST = """import sums


def test_add():
    assert sums.add(1, 2) == 3


def test_take():
    assert sums.take(5, 2) == 3


def test_none():
    assert sums.add(0, 0) == 0
"""
PERL = """package Sums;
use strict;

sub add {
    my ($a, $b) = @_;
    return $a + $b;
}

sub take {
    my ($a, $b) = @_;
    return $a + $b;
}

1;
"""
PERL_TEST = """use strict;
use Test::More tests => 3;
use Sums;

is(Sums::add(1, 2), 3, 'add');
is(Sums::take(5, 2), 3, 'take');
is(Sums::add(0, 0), 0, 'none');
"""
JAVASCRIPT = """function add(a, b) {
  return a + b;
}

function take(a, b) {
  return a + b;
}

module.exports = { add, take };
"""
JAVASCRIPT_TEST = """const test = require('node:test');
const assert = require('node:assert');
const { add, take } = require('../sums');

test('add', () => assert.strictEqual(add(1, 2), 3));
test('take', () => {
  assert.strictEqual(take(5, 2), 3);
});
test('none', () => assert.strictEqual(add(0, 0), 0));
"""
# As for Vitest; the name in `import` is that of the compiled file.
TYPESCRIPT = """export function add(a: number, b: number): number {
  return a + b;
}

export function take(a: number, b: number): number {
  return a + b;
}
"""
TYPESCRIPT_TEST = """import { describe, expect, it } from 'vitest';
import { add, take } from '../src/sums.js';

describe('sums', () => {
  it('add', () => expect(add(1, 2)).toBe(3));
  it('take', () => {
    expect(take(5, 2)).toBe(3);
  });
  it.each([[0, 0]])('none %i', (a, b) => expect(add(a, b)).toBe(0));
});
"""
# As for mocha and chai.
MOCHA_TEST = """const { expect } = require('chai');
const { add, take } = require('../sums');

describe('sums', function () {
  it('add', () => expect(add(1, 2)).to.equal(3));
  it('take', () => {
    expect(take(5, 2)).to.equal(3);
  });
  it('none', () => expect(add(0, 0)).to.equal(0));
});
"""
COMPOSER = '{"autoload": {"psr-4": {"Own\\\\Sums\\\\": "code/"}}}'


@dataclasses.dataclass(frozen=True)
class Sample:
    """A package, where it is broken, its tests' names, and what its failure shows."""

    files: dict[str, str]
    broken: str
    tests: tuple[str, str, str]  # the second one fails
    shown: tuple[str, ...]
    language: str


SAMPLES = {
    "ruby": Sample(
        {"lib/sums.rb": RUBY, "test/sums_test.rb": RUBY_TEST},
        "lib/sums.rb",
        tuple(f"test/sums_test.rb::SumsTest#test_{x}" for x in ("add", "take", "none")),
        (">>> assert_equal 3, Sums.take(5, 2)\nExpected: 3\n  Actual: 7",),
        "ruby",
    ),
    "php": Sample(
        {
            "composer.json": COMPOSER,
            "code/Sums.php": PHP,
            "tests/Base.php": PHP_BASE,
            "tests/SumsTest.php": PHP_TEST,
        },
        "code/Sums.php",
        tuple(
            f"tests/SumsTest.php::Sums (Own\\Sums\\Tests\\Sums): {x}"
            for x in ("Add", "Take", "None")
        ),
        ("7 is identical to 3", ">>> $this->assertSame(3, Sums::take(5, 2));"),
        "php",
    ),
    "java": Sample(
        {
            "src/main/java/own/cli/Sums.java": JAVA,
            "src/test/java/own/cli/SumsTest.java": JAVA_TEST,
        },
        "src/main/java/own/cli/Sums.java",
        tuple(f"tests::{x}(own.cli.SumsTest)" for x in ("add", "take", "none")),
        ("expected:<3> but was:<7>", ">>> assertEquals(3, Sums.take(5, 2));"),
        "java",
    ),
    "go": Sample(
        {"go.mod": "module own.org/sums\n", "sums.go": GO, "sums_test.go": GO_TEST},
        "sums.go",
        tuple(f"tests::Test{x}" for x in ("Add", "Take", "None")),
        ("5 - 2 = 7",),
        "go",
    ),
    "c": Sample(
        {"sums.c": C, "test/test_sums.c": C_TEST},
        "sums.c",
        tuple(f"test/test_sums.c::{x}" for x in ("1 add", "2 take", "3 none")),
        ("\nwanted 3, got 7\n",),
        "c",
    ),
    "c++": Sample(
        {"sums.cpp": C, "test/test_sums.cpp": CPP_TEST},
        "sums.cpp",
        tuple(f"test/test_sums.cpp::{x}" for x in ("1 add", "2 take", "3 none")),
        ("\nwanted 3, got 7\n",),
        "c++",
    ),
    "pytest": Sample(
        {"sums.py": PYTHON, "tests/test_sums.py": PYTEST},
        "sums.py",
        tuple(f"tests/test_sums.py::test_{x}" for x in ("add", "take", "none")),
        (">>> assert sums.take(5, 2) == 3",),
        "python",
    ),
    "perl": Sample(
        {"lib/Sums.pm": PERL, "t/test_sums.t": PERL_TEST},
        "lib/Sums.pm",
        tuple(f"t/test_sums.t::{x}" for x in ("1 add", "2 take", "3 none")),
        ("got: '7'\n", "expected: '3'\n"),
        "perl",
    ),
    "javascript": Sample(
        {
            "package.json": "{}",
            "sums.js": JAVASCRIPT,
            "test/sums.test.js": JAVASCRIPT_TEST,
        },
        "sums.js",
        tuple(f"test/sums.test.js::{x}" for x in ("add", "take", "none")),
        (">>> assert.strictEqual(take(5, 2), 3);", "7 !== 3"),
        "javascript",
    ),
}
# Their runners come from npm.
NPM_SAMPLES = {
    "mocha": Sample(
        {"package.json": "{}", "sums.js": JAVASCRIPT, "test/sums.js": MOCHA_TEST},
        "sums.js",
        tuple(f"test/sums.js::sums > {x}" for x in ("add", "take", "none")),
        (">>> expect(take(5, 2)).to.equal(3);", "expected 7 to equal 3"),
        "javascript",
    ),
    "typescript": Sample(
        {
            "package.json": '{"type": "module"}',
            "src/sums.ts": TYPESCRIPT,
            "test/sums.spec.ts": TYPESCRIPT_TEST,
        },
        "src/sums.ts",
        tuple(f"test/sums.spec.ts::sums > {x}" for x in ("add", "take", "none 0")),
        (">>> expect(take(5, 2)).toBe(3);", "Expected: 3\nReceived: 7"),
        "typescript",
    ),
}
EVERY = {**SAMPLES, **NPM_SAMPLES}
