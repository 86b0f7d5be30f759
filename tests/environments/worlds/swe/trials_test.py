"""What a trial reads of the line that tells its processors' time."""

from absl.testing import absltest, parameterized

from glm5_jax.environments.worlds.swe import trials


class CpuSecondsTest(parameterized.TestCase):
    @parameterized.parameters(
        ("0m1.250s 0m0.030s\n", 1.28),
        ("2m0.5s 1m0s", 180.5),
        ("", 0.0),  # the trial was killed before it told them
    )
    def test_seconds_are_summed_up(self, line, seconds):
        self.assertAlmostEqual(trials._cpu_seconds(line), seconds)


if __name__ == "__main__":
    absltest.main()
