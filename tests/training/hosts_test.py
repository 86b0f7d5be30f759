"""Which process the others wait for, of what each says of its steps."""

from absl.testing import parameterized

from glm5_jax.training.run import hosts
from tests import environment


def said(*own, step=1.0):
    return [hosts.Seconds(step=step, own=seconds) for seconds in own]


class HostsTest(parameterized.TestCase):
    def test_a_straggler_is_named(self):
        found = said(0.02, 0.03, 0.6, 0.02)
        self.assertRegex(hosts.straggler(found), "process 2 of 4 takes 0.600 s.*0.020")
        self.assertEqual(
            hosts.metrics(found),
            {
                "hosts/slowest": 2,
                "hosts/own_seconds_max": 0.6,
                "hosts/own_seconds_median": 0.025,
                "hosts/step_seconds_max": 1.0,
            },
        )

    @parameterized.parameters((said(0.5, 0.52),), (said(0.896, 0.793),))
    def test_a_slow_step_of_all_names_nobody(self, found):
        self.assertEmpty(hosts.straggler(found))


if __name__ == "__main__":
    environment.main()
