"""Breaks of sources: each changes the program, and none what is in a string."""

import ast

from absl.testing import parameterized

from glm5_jax.environments.worlds.swe import mutate
from tests import environment

PYTHON = '''def f(x, ä):
    """Returns 1 if x < 2."""
    total = 0  # x < 2
    if x < 2 and ä is not None:
        total += 1
    return (x +
            ä) if not x else total
'''


def results(text, language):
    return {b.apply(text) for b in mutate.breaks(text, language)}


class PythonTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("compare", "x < 2 and", "x <= 2 and"),
        ("logic", "2 and ä", "2 or ä"),
        ("identity", "is not None", "is None"),
        ("lost_line", "total += 1", "pass"),
        ("arithmetic_over_lines", "(x +\n", "(x -\n"),
        ("lost_not", "not x else", "(x) else"),
        ("number", "total = 0", "total = 1"),
        (
            "condition",
            "if x < 2 and ä is not None:",
            "if not (x < 2 and ä is not None):",
        ),
    )
    def test_breaks(self, old, new):
        self.assertEqual(PYTHON.count(old), 1)
        self.assertIn(PYTHON.replace(old, new), results(PYTHON, "python"))

    def test_every_break_is_another_program(self):
        trees = [ast.dump(ast.parse(text)) for text in results(PYTHON, "python")]
        self.assertGreater(len(trees), 10)
        self.assertLen({ast.dump(ast.parse(PYTHON)), *trees}, len(trees) + 1)

    def test_strings_and_comments_stay(self):
        for text in results(PYTHON, "python"):
            self.assertIn('"""Returns 1 if x < 2."""', text)
            self.assertIn("# x < 2", text)

    def test_another_python_has_none(self):
        self.assertEmpty(mutate.breaks("print 'x'", "python"))


class TokensTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("c", 'if (a < b) puts("a < b"); // a < b\n', "a <= b"),
        ("javascript", "x = a === b; /* a === b */ y = 'a === b';\n", "a !== b"),
        ("perl", "return 1 if $a eq $b; # $a eq $b\n", "$a ne $b"),
        ("java", 'if (a < b) x = ""; // "a < b" /* a < b */\n', "a <= b"),
        ("go", "if a < b { x = 1 }; y = `a < b` // a < b\n", "a <= b"),
        ("php", "if ($a < $b) $x = 1; $y = '$a < $b'; # $a < $b\n", "$a <= $b"),
        ("ruby", "x = 1 if a < b; y = %w[a < b] # a < b\n", "a <= b"),
    )
    def test_only_code_changes(self, text, new):
        language = self._testMethodName.rpartition("_")[2]
        kept = text.partition(";")[2]
        found = results(text, language)
        self.assertTrue(any(new in each for each in found))
        self.assertTrue(all(each.endswith(kept) for each in found))

    @parameterized.parameters(
        ("php", "<?php $a = <<<X\n b < c\n  X . ($d && $e);\n?>\nb < c\n", "$d || $e"),
        ("ruby", "x = a && b\n=begin\nc && d\n=end\n__END__\nc && d\n", "a || b"),
        ("ruby", 'x = a && b if y =~ /c && d/\nz = "#{c && d}"\n', "a || b"),
    )
    def test_texts_of_several_lines_stay(self, language, text, new):
        found = [each for each in results(text, language) if new in each]
        self.assertLen(found, 1)
        counts = {each.count("b < c") + each.count("c && d") for each in
                  results(text, language)}  # fmt: skip
        self.assertEqual(counts, {2})

    @parameterized.parameters(
        ("go", "if !a { return b }\n", {"if a { return b }\n"}),
        ("java", "return a;\n", set()),
        ("ruby", "x if a\n", {"x unless a\n"}),
    )
    def test_operators_of_a_language(self, language, text, wanted):
        self.assertEqual(results(text, language), wanted)


if __name__ == "__main__":
    environment.main()
