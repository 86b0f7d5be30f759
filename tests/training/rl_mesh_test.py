"""Stage rl on several devices: the same episodes, the same curve."""

import pathlib
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from glm5_jax import environments
from glm5_jax.training import loop
from tests import environment, runs
from tests.training import rl_runs

# Float32 in another order, through two of Adam's steps: 2e-6 was seen.
ATOL = 1e-5


@pytest.mark.slow
class MeshTest(parameterized.TestCase):
    @parameterized.parameters(
        {"fsdp": 2},
        # The routers' choices go along; trainer and engine may differ by 1e-5.
        {"fsdp": 2, "expert": 2, "tensor": 2, "router_replay": True},
    )
    def test_several_devices_learn_as_one_does(self, router_replay=False, **axes):
        root = pathlib.Path(self.create_tempdir().full_path)
        rl = {"router_replay": router_replay}
        config = rl_runs.make_config(rl, {"num_hidden_layers": 2}, num_steps=2)
        for name, mesh in (("1", {}), ("2", axes)):
            with (
                runs.use_devices(**mesh),
                mock.patch.object(environments, "make", return_value=rl_runs.Lottery()),
            ):
                loop.train(config, root / name)
        lines = [rl_runs.computed(root / name) for name in "12"]
        self.assertLen(lines[1], 2)
        for one, two in zip(*lines, strict=True):
            self.assertEqual(one.keys(), two.keys())
            for name, value in one.items():
                self.assertAlmostEqual(two[name], value, delta=ATOL, msg=name)
        states = [rl_runs.read_state(root / name, config)["params"] for name in "12"]
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=ATOL),
            *states,
        )


if __name__ == "__main__":
    environment.main()
