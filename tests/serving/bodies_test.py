"""What bodies ask of the engine."""

import itertools
from unittest import mock

from absl.testing import absltest

from glm5_jax.http_server import errors
from glm5_jax.inference import service
from glm5_jax.serving import bodies, served
from tests import environment


def model(**fields):
    """Returns a model as a process has it that has just begun."""
    driver = mock.create_autospec(service.Service, instance=True, capacity=64)
    driver.new_id.side_effect = itertools.count()
    return served.Served(name="m", service=driver, **fields)


def asked(model, **fields):
    return bodies.Sampling(**fields).requests(model, [1], 4, frozenset())


class SeedsTest(absltest.TestCase):
    def test_servers_without_a_seed_draw_other_answers(self):
        seeds = [r.seed for _ in range(2) for r in asked(model(), n=3)]
        self.assertNotIn(None, seeds)
        self.assertLen({*seeds}, 6)
        self.assertBetween(min(seeds), 0, 2**31 - 1)
        self.assertBetween(max(seeds), 0, 2**31 - 1)

    def test_servers_with_a_seed_repeat_their_answers(self):
        seeded = [asked(model(is_seeded=True), n=2) for _ in range(2)]
        self.assertEqual(*seeded)
        self.assertEqual([(r.id, r.seed) for r in seeded[0]], [(0, None), (1, None)])

    def test_a_body_s_seed_is_that_of_its_first_choice(self):
        for fields in ({}, {"is_seeded": True}):
            found = asked(model(**fields), n=2, seed=2**31 - 1)
            self.assertEqual([r.seed for r in found], [2**31 - 1, 0])


class BiasTest(absltest.TestCase):
    def test_ids_are_read_whole(self):
        (request,) = asked(model(), logit_bias={"7": 1.5, "12": -1.0})
        self.assertEqual(request.logit_bias, {7: 1.5, 12: -1.0})
        for wrong in ("0000000000057", "9" * 5000, "-1", "a", ""):
            with self.assertRaisesRegex(errors.ApiError, "ids as its keys"):
                asked(model(), logit_bias={wrong: 1.0})


if __name__ == "__main__":
    environment.main()
