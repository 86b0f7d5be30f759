"""A kind of tasks that no step learns from is named, with what became of its groups."""

from absl.testing import absltest

from glm5_jax.rl.actors import starving
from tests import environment


class StarvingTest(absltest.TestCase):
    def test_a_tag_without_a_group_is_named_once_in_a_while(self):
        tags = starving.Starving()
        tags.began("fast")
        for _ in range(10):
            tags.took(["fast"])
        self.assertEqual(tags.longest, 0)
        tags.began("slow")
        tags.began("solved")
        for reason in ("equal", "equal", "paused"):
            tags.lost("solved", reason)
        with self.assertNoLogs(level="WARNING"):
            for _ in range(24):
                tags.took(["fast", "fast"])
        with self.assertLogs(level="WARNING") as logs:
            tags.took(["fast"])
        slow, solved = (record.getMessage() for record in logs.records)
        self.assertIn("'slow' was in the last 25 steps: none has ended", slow)
        self.assertIn("'solved' was in the last 25 steps: 2 equal, 1 paused", solved)
        self.assertEqual(tags.longest, 25)
        tags.took(["slow", "solved"])
        self.assertEqual(tags.longest, 1)  # of the others
        tags.lost("solved", "stale")
        with self.assertLogs(level="WARNING") as logs:
            for _ in range(25):
                tags.took(["slow", "fast"])
        self.assertIn("'solved' was in the last 25 steps: 1 stale", logs.output[0])


if __name__ == "__main__":
    environment.main()
