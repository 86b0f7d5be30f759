"""Stop strings in texts that arrive in pieces."""

import hypothesis
from absl.testing import parameterized
from hypothesis import strategies as st

from glm5_jax.data.chat import templates
from glm5_jax.inference import events, requests
from glm5_jax.serving import stop_strings, turn
from tests import environment
from tests.serving.scripted import TOKENIZER

QUICK = hypothesis.settings(
    max_examples=100, deadline=None, derandomize=True, database=None
)


def cut(pieces, stops):
    """Returns the texts that are set free, and the string that was found."""
    found = stop_strings.StopStrings(stops)
    return [*map(found.feed, pieces), found.close()], found.found


def expected(text, stops):
    """Reads the text character by character."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end - len(stop)], stop
    return text, None


class StopStringsTest(parameterized.TestCase):
    @QUICK
    @hypothesis.given(
        st.lists(st.text("ab", max_size=4), max_size=6),
        st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    )
    def test_any_pieces_give_the_text_before_the_first_end(self, pieces, stops):
        texts, found = cut(pieces, stops)
        self.assertEqual(("".join(texts), found), expected("".join(pieces), stops))

    def test_only_what_may_begin_a_stop_string_waits(self):
        texts, found = cut(["one <", "e", "nt", "<end"], ["<end>"])
        self.assertEqual(texts, ["one ", "", "<ent", "", "<end"])
        self.assertIsNone(found)


class TurnTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("blanks_alone", "abc\n\nd", "\n\n", "abc", 5),
        ("blanks_at_the_end", "abc, d", ", ", "abc", 5),
        ("one_blank", "a b", " ", "a", 2),
        ("blanks_before_it", "abc \nHuman: d", "Human:", "abc", 11),
        ("blanks_within_the_content_stay", "a\n\nb  ", "c", "a\n\nb", 6),
        ("blanks_before_the_content", " \nabc\nd", "\n", "abc", 6),
    )
    def test_blanks_of_a_chat(self, text, stop, wanted, num_tokens):
        template = templates.Template(TOKENIZER)
        read = turn.chat(template, [TOKENIZER.special_ids["</think>"]], (), [stop])
        told = ""
        for id in TOKENIZER.encode(text):
            tokens = events.Tokens((id,), (0.0,), (0,), (0.0,), ([],))
            told += read.feed(tokens).content
        end = events.End("length", requests.Completion([], [], None))
        told += read.feed(end).content
        self.assertEqual((read.content, told), (wanted, wanted))
        self.assertLen(read.tokens, num_tokens)
        self.assertEqual(read.stop_string, stop if stop in text.lstrip() else None)


if __name__ == "__main__":
    environment.main()
