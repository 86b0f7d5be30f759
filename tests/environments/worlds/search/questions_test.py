"""Articles, walks and filters, by collections that are small enough to see."""

import gzip
import pathlib
import random
import tempfile

from absl.testing import absltest, parameterized

from glm5_jax import config
from glm5_jax.environments.worlds.search import articles, index, questions, screen

_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
ENTRIES = {
    (
        "Alpha",
        "AL",
    ): "Alpha\nAL\n\n   <language> A {Beta} of 1974, by {Some\n   One}.\n",
    ("Beta",): "Beta\n\n   See {alpha}.\n\n   (1999-01-02)\n",
}


def graph(*edges, **texts):
    """Returns articles Xa, Xb, ... filed under x, linked by pairs such as "ab"."""
    letters = sorted(set("".join(edges)))
    links = {n: " ".join(f"{{X{e[1]}}}" for e in edges if e[0] == n) for n in letters}
    return articles.link(
        [
            articles.Article((f"X{n}",), ("x",), texts.get(n, "") + links[n])
            for n in links
        ]
    )


def question(graph, path, *clues):
    """Returns a question of a path "abc"; clues are tags, one for each link."""
    numbers = tuple(graph.by_name[f"x{letter}"] for letter in path)
    told = tuple((questions.Clue("tag", clue),) for clue in clues)
    return questions.Question(numbers, "what", told)


def in_base_64(number):
    """Returns a number in dictd's digits."""
    found = ""
    while number or not found:
        number, digit = divmod(number, 64)
        found = _DIGITS[digit] + found
    return found


class ArticlesTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def test_dictionaries_are_read(self):
        padding = b"x" * 70_000  # so that offsets have three digits
        data, lines = padding, []
        for names, entry in ENTRIES.items():
            place = in_base_64(len(data)), in_base_64(len(entry.encode()))
            lines += ["\t".join((name.lower(), *place)) for name in names]
            data += entry.encode()
        (self.folder / "d.dict.dz").write_bytes(gzip.compress(data))
        (self.folder / "d.index").write_text("\n".join(sorted(lines)))
        alpha, beta = found = articles._read_foldoc(self.folder / "d")
        self.assertEqual(alpha.names, ("Alpha", "AL"))
        self.assertEqual(alpha.tags, ("language",))
        self.assertEqual(alpha.links, ("beta", "some one"))
        self.assertEqual(alpha.years, {"1974"})
        self.assertEqual(beta.years, frozenset())  # a date of an edit
        linked = articles.link(found)
        self.assertEqual(linked.targets, ((1,), (0,)))
        self.assertEqual(linked.sources, ((1,), (0,)))
        self.assertEqual(linked.find(" AL "), 0)

    def test_a_line_ends_at_a_line_feed_alone(self):
        path = self.folder / "own.jsonl"
        path.write_text('{"title": "a", "text": "b\u2028c\x85d"}\n', encoding="utf-8")
        [article] = articles.read.__wrapped__(str(path)).articles
        self.assertEqual(article.text, "b\u2028c\x85d")

    def test_wrong_lines_are_named(self):
        path = self.folder / "own.jsonl"
        good = '{"title": "a", "text": "b"}\n'
        wrong = ("{", "[]", '{"title": "a"}', '{"title": "", "text": ""}', "1")
        letters = [good[:-2] + f', "{key}": "ada"}}' for key in ("names", "tags")]
        for bad in (*wrong, *letters):
            path.write_text(good + bad)
            with self.assertRaisesRegex(config.InputError, "own.jsonl:2: a line must"):
                articles.read.__wrapped__(str(path))

    def test_missing_collections_are_named(self):
        with self.assertRaisesRegex(config.InputError, "manpages or a file .jsonl"):
            articles.read("nowhere")
        with self.assertRaisesRegex(config.InputError, "apt-get install dict-foldoc"):
            articles._read_foldoc(self.folder / "none")


class OnlyWayTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("a_line", ("ab", "bc"), True),
        ("two_answers", ("ab", "bc", "bd"), False),
        ("two_answers_of_two_ways", ("ab", "bc", "ae", "ed"), False),
        ("two_ways_to_one_answer", ("ab", "bc", "ad", "dc"), False),
        ("a_dead_end", ("ab", "bc", "ad"), True),
        ("another_source_that_the_first_does_not_reach", ("ab", "bc", "dc"), True),
    )
    def test_by_hand(self, edges, expected):
        made = graph(*edges)
        asked = question(made, "abc", "x", "x")
        first = [made.by_name["xa"]]
        self.assertEqual(questions.is_only_way(made, first, asked), expected)

    def test_two_first_articles_are_two_ways(self):
        made = graph("ab", "bc", "db")
        asked, firsts = question(made, "abc", "x", "x"), [0, made.by_name["xd"]]
        self.assertTrue(questions.is_only_way(made, firsts[:1], asked))
        self.assertFalse(questions.is_only_way(made, firsts, asked))

    def test_clues_rule_out(self):
        made = graph("ab", "bc", "bd", c="In 1974. ")
        clues = (questions.Clue("tag", "x"),), (questions.Clue("year", "1974"),)
        asked = questions.Question((0, 1, 2), "what", clues)
        self.assertTrue(questions.is_only_way(made, [0], asked))
        self.assertEqual(questions.forward(made, [0], asked), [{0}, {1}, {2}])


class WordsTest(absltest.TestCase):
    def test_names_are_replaced_by_what_defines_them(self):
        made = articles.link(
            [
                articles.Article(
                    ("Basic BCPL", "BCPL"),
                    (),
                    "<language> (BCPL) A small language that BCPL's author took from "
                    "{CPL} at {Mit}. More.",
                ),
                articles.Article(
                    ("CPL",), (), "CPL is a language that two universities made. No."
                ),
                articles.Article(("MIT",), (), "Short."),
            ]
        )
        self.assertEqual(
            questions.describe(made, 0),
            "A small language that ?'s author took from [of which is said: \"? is a "
            'language that two universities made."] at Mit.',
        )

    def test_the_question_tells_all_clues(self):
        clues = (
            (questions.Clue("tag", "person"),),
            (questions.Clue("tag", "tool"), questions.Clue("year", "1974")),
        )
        self.assertEndsWith(
            questions.Question((0, 1, 2), "It is ?.", clues).text(),
            '("?"): "It is ?." It refers to an article filed under "person" (1). '
            'Article 1 refers to an article filed under "tool" that mentions the year '
            "1974 (2). What is the title of article 2?",
        )

    def test_short_and_long_sentences_define_nothing(self):
        for count, expected in ((7, False), (8, True), (60, True), (61, False)):
            text = " ".join(["word"] * count) + "."
            found = questions.definition(articles.Article(("a",), (), text))
            self.assertEqual(bool(found), expected, count)


class ScreenTest(absltest.TestCase):
    """A collection in which one question is good, and each change makes it bad."""

    TEXT = "The one that has zebras, quaggas and okapis in its old park. "

    def flaw(self, *more, **changes):
        known = "mnopqrst"  # 8 articles that three others refer to
        edges = ["za", "ab", "bc", *more]
        edges += [f"{source}{name}" for name in known for source in "ywk"]
        texts = {"a": self.TEXT, "c": "Nowhere. ", **changes}
        made = graph(*edges, **texts)
        asked = question(made, "abc", "x", "x")
        described = questions.describe(made, 0)
        asked = questions.Question(asked.path, described, asked.clues)
        return screen.flaw(made, index.Index(made), asked)

    def test_a_good_question(self):
        self.assertEqual(self.flaw(), "")

    def test_a_shortcut(self):
        self.assertIn("the first article links", self.flaw("ac"))

    def test_the_best_known(self):
        self.assertEqual(self.flaw("uc", "vc"), "guessed without a search")

    def test_one_search(self):
        self.assertIn("one search", self.flaw(c="Zebras, quaggas and okapis. "))

    def test_another_answer(self):
        self.assertEqual(self.flaw("bd"), "other articles fit all clues")

    def test_a_named_answer(self):
        self.assertIn("names the answer", self.flaw(a=self.TEXT.replace("old", "xc")))


class WalkTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("no_links", ("aa",), {}, "no article is rare"),
        ("no_sentence", ("ab", "ba"), {}, "no defining sentence"),
        ("a_short_circle", ("ab", "ba"), "ab", "ends too early"),
        ("a_circle", ("ab", "bc", "ca"), "abc", "Question"),
        ("two_ways", ("ab", "bc", "ca", "ad", "dc", "bd", "cb"), "abcd", "other"),
    )
    def test_outcomes(self, edges, told, expected):
        texts = {n: f"{ScreenTest.TEXT[:-2]} {n * 3}. " for n in told}
        found = questions.walk(graph(*edges, **texts), random.Random(0), 2)
        self.assertIn(expected, str(found))

    def test_years_are_told_where_they_are_needed(self):
        made = graph("ab", "bc", "bd", "ca", "da", c="In 1974. ", a=ScreenTest.TEXT)
        found = [questions.walk(made, random.Random(seed), 2) for seed in range(40)]
        good = [x for x in found if not isinstance(x, str) and x.path[0] == 0]
        self.assertNotEmpty(good)
        for asked in good:
            self.assertEqual(made.articles[asked.path[-1]].title, "Xc")
            self.assertEqual(asked.clues[-1][-1], questions.Clue("year", "1974"))


if __name__ == "__main__":
    absltest.main()
