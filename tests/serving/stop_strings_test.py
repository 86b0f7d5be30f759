"""Stop strings in texts that arrive in pieces."""

import hypothesis
from absl.testing import parameterized
from hypothesis import strategies as st

from glm5_jax.serving import stop_strings
from tests import environment

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


if __name__ == "__main__":
    environment.main()
