"""Copies of messages of any size."""

from absl.testing import absltest, parameterized

from glm5_jax.rl import copies


class CopiesTest(parameterized.TestCase):
    def test_a_copy_shares_nothing(self):
        calls = [{"function": {"name": "f", "arguments": {"x": (1, 2.5, None)}}}]
        message = {"role": "assistant", "content": "abc", "tool_calls": calls}
        found = copies.of_message(message, 100)
        calls[0]["function"]["name"] = "g"
        arguments = {"x": [1, 2.5, None]}
        same = [{"function": {"name": "f", "arguments": arguments}}]
        wanted = {"role": "assistant", "content": "abc", "tool_calls": same}
        self.assertEqual(found, wanted)

    def test_texts_are_cut_at_the_limit(self):
        for size in (9, 10, 11, 1000):
            found = copies.of_message({"content": "x" * size}, 10)
            self.assertEqual(found, {"content": "x" * min(size, 10)})

    def test_a_message_has_sixteen_times_the_limit_at_most(self):
        """Characters, and one for each value that is no text."""
        limit = 10
        # The message, its name of 4 characters and the list count too.
        for number, is_fine in ((16 * limit - 6, True), (16 * limit - 5, False)):
            message = {"name": [0] * number}
            if is_fine:
                self.assertEqual(copies.of_message(message, limit), message)
            else:
                with self.assertRaisesRegex(ValueError, "more than 160 characters"):
                    copies.of_message(message, limit)

    def test_only_mappings_are_messages(self):
        with self.assertRaisesRegex(TypeError, "must be a mapping, got list"):
            copies.of_message([], 10)


if __name__ == "__main__":
    absltest.main()
