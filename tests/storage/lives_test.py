"""A run whose folder is in a bucket: machines die, bits flip, runs are rolled back."""

import os
import shutil
import time
from unittest import mock

from absl.testing import parameterized

from glm5_jax.checkpoint import rollback
from glm5_jax.storage import kept
from glm5_jax.training.reporting import metrics
from tests import environment, forked
from tests.storage import emulators
from tests.training import kill_test

HELD = 6  # steps of the life that is killed: it does not end before


def live(config, address, compiled, environ, last):
    """Starts or resumes the run, in a child, on the machine of `environ`."""
    os.environ.update(environ)
    emulators.configure(environ)
    with (
        mock.patch.object(kept, "SECONDS", 0.1),
        kept.in_step(address) as workdir,
    ):
        kill_test.live(config, workdir, compiled, last)


class BucketTest(kill_test.LivesTest):
    """What holds of every store: one program and one run beside are for all of them."""

    num_steps = 8

    def begin(self, scheme):
        """Starts the store, and a machine that keeps its copies in a folder."""
        self.scheme, self.home = scheme, self.root / scheme
        self.environ = self.enterContext(emulators.serving(scheme, self.home))
        self.address = f"{scheme}://bucket/run"

    def start(self, workdir, last=None):
        if not isinstance(workdir, str):
            return super().start(workdir, last)
        given = self.config, workdir, self.compiled, self.environ, last
        child = forked.PROCESSES.Process(target=live, args=given)
        child.start()
        self.addCleanup(child.kill)
        return child

    def sealed(self):
        """The steps that count in the bucket."""
        names = emulators.objects(self.scheme, "run/checkpoints")
        return sorted(
            int(n.split("/")[0]) for n in names if n.endswith("manifest.json")
        )

    def steps_of(self, workdir):
        return [r["step"] for r in metrics.read(workdir / "metrics.jsonl")]

    def lose_the_machine(self):
        shutil.rmtree(self.home)

    def flip_a_bit(self, step):
        names = emulators.objects(self.scheme, f"run/checkpoints/{step}")
        (name,) = [n for n in names if n.startswith("params/d/")]
        path = f"bucket/run/checkpoints/{step}/{name}"
        system = emulators.system(self.scheme)
        body = bytearray(system.cat_file(path))
        body[len(body) // 2] ^= 1
        system.pipe_file(path, bytes(body))

    @parameterized.parameters("gs", "s3")
    def test_a_machine_dies_a_bit_flips_and_the_run_is_rolled_back(self, scheme):
        self.begin(scheme)
        if not (self.root / "local").exists():
            self.finish(self.root / "local")
        child = self.start(self.address, HELD)
        deadline = time.monotonic() + kill_test.SECONDS
        while len(self.sealed()) < 2:
            self.assertTrue(child.is_alive())
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.1)
        child.kill()
        child.join()
        self.lose_the_machine()
        newest = self.sealed()[-1]
        self.flip_a_bit(newest)
        self.finish(self.address)
        with kept.in_step(self.address) as workdir:
            self.assert_same_end(self.root / "local", workdir)
            there = os.listdir(workdir / "checkpoints")
            self.assertIn(f"{newest}.damaged", there)
            steps = self.steps_of(workdir)
            before, last = sorted(int(n) for n in there if n.isdecimal())[-2:]
        self.assertEqual(self.sealed()[-1], last)
        # Rolled back here, gone on with elsewhere.
        with kept.in_step(self.address) as workdir:
            rollback.by_hand(workdir, before, 0)
        self.assertEqual(self.sealed()[-1], before)
        self.lose_the_machine()
        self.finish(self.address)
        self.assertEqual(self.sealed()[-1], last)
        with kept.in_step(self.address) as workdir:
            self.assert_same_end(self.root / "local", workdir)
            self.assertEqual(self.steps_of(workdir), steps)


if __name__ == "__main__":
    environment.main()
