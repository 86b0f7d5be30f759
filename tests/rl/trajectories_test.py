"""Records of episodes come back as they were, or are refused."""

import json

import numpy as np
from absl.testing import parameterized

from glm5_jax.environments import protocol
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import gateway, trajectories
from tests import environment


def episode(**changes):
    samples = [
        gateway.Sample([1, 2, 3], [False, True, True], [0.0, -0.1, -2 / 3], [-1, 4, 5]),
        gateway.Sample(
            [7, 8],
            [False, True],
            [0.0, -1e-7],
            [-1, 5],
            np.array([[[3, 65535]]], np.int32),
        ),
    ]
    task = protocol.Task(
        "t/1", ({"role": "user", "content": "é"},), ["x", 1], ({"name": "f"},), tag="a"
    )
    fields = {
        "task": task,
        "group": 3,
        "samples": samples,
        "reward": protocol.Reward(0.1, {"right": 0.1}),
        "label": protocol.Label.OK,
        "num_turns": 2,
        "num_forks": 1,
        "transcript": [{"role": "user", "content": "é"}],
        "reason": "",
        "num_drift_tokens": 1,
        "num_truncated": 0,
        "close_error": "late",
    }
    return episodes_lib.Episode(**(fields | changes))


class TrajectoriesTest(parameterized.TestCase):
    @parameterized.parameters(
        {}, {"reward": None, "label": protocol.Label.TIMEOUT, "samples": []}
    )
    def test_a_record_comes_back_the_same(self, **changes):
        before = episode(**changes)
        text = json.dumps(trajectories.to_json(before))
        after = trajectories.from_json(json.loads(text))
        self.assertEqual(after.task, before.task)
        for ours, theirs in zip(after.samples, before.samples, strict=True):
            np.testing.assert_array_equal(ours.experts, theirs.experts)
            ours.experts = theirs.experts = None
            self.assertEqual(ours, theirs)  # log-probs to the last bit
        after.samples.clear()
        before.samples.clear()
        self.assertEqual(after, before)

    def test_an_episode_of_several_lists_is_written_once(self):
        one, other = episode(group=1), episode(group=2)
        lists = [[one, other], [], [other, other, one]]
        packed = json.loads(json.dumps(trajectories.pack(lists)))
        self.assertLen(packed["records"], 2)
        found = trajectories.unpack(packed)
        groups = [[e.group for e in some] for some in found]
        self.assertEqual(groups, [[1, 2], [], [2, 2, 1]])
        self.assertIs(found[0][1], found[2][0])
        self.assertEqual(trajectories.unpack(trajectories.pack([])), [])

    @parameterized.named_parameters(
        ("other_format", {"format": 2}, "must have format 1, got 2"),
        ("no_label", {"label": "fine"}, "damaged"),
        (
            "a_length",
            {
                "samples": [
                    {
                        "tokens": [1],
                        "mask": [],
                        "logprobs": [],
                        "versions": [],
                        "experts": None,
                    }
                ]
            },
            "damaged",
        ),
    )
    def test_damage_is_refused(self, change, words):
        record = trajectories.to_json(episode()) | change
        with self.assertRaisesRegex(trajectories.FormatError, words):
            trajectories.from_json(record)


if __name__ == "__main__":
    environment.main()
