"""The number of episodes follows what the cache can hold."""

import collections
import random

from absl.testing import parameterized

from glm5_jax.inference import requests
from glm5_jax.rl.actors import window as window_lib
from tests import environment

MAX_TURNS, OBSERVED, DRAWN = 6, 150, 50  # turns, and tokens of each


class Cache:
    """Keeps the texts that were read last, whole, and forgets the others."""

    def __init__(self, room):
        self._room, self._texts = room, collections.OrderedDict()
        self.num_read = 0

    def turn(self, episode, request, version=0):
        before = self._texts.pop(episode, [])
        found = len(before) if request.prompt[: len(before)] == before else 0
        self.num_read += len(request.prompt) - found
        drawn = [random.randrange(1000) for _ in range(DRAWN)]
        self._texts[episode] = [*request.prompt, *drawn[:-1]]
        while sum(map(len, self._texts.values())) > self._room:
            self._texts.popitem(last=False)
        return requests.Completion(
            drawn, [0.0] * DRAWN, "stop", [version] * DRAWN, num_cached=found
        )


def play(window, cache, num_turns, version=lambda turn: 0):
    """Plays episodes in turn, as many as the window lets; returns their numbers."""
    running, numbers, begun = [], [], 0
    for turn in range(num_turns):
        while len(running) < window.limit:
            running.append([begun * MAX_TURNS, 0, []])
            window.began(begun * MAX_TURNS)
            begun += 1
        numbers.append(len(running))
        first, done, text = episode = running.pop(0)
        text += [random.randrange(1000) for _ in range(OBSERVED)]
        request = requests.Request(first + done, [*text], DRAWN)
        completion = cache.turn(first, request, version(turn))
        window.drew(request, completion)
        text += completion.tokens
        episode[1] += 1
        if episode[1] < MAX_TURNS:
            running.append(episode)
        else:
            window.ended(first, MAX_TURNS)
    return numbers


class WindowTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        random.seed(0)

    def test_it_finds_what_the_cache_can_hold(self):
        """Episodes have 700 tokens on average: ten fit, forty do not."""
        window, cache = window_lib.Window(40), Cache(room=7_000)
        play(window, cache, 2_000)
        num_read, numbers = cache.num_read, play(window, cache, 2_000)
        self.assertBetween(sum(numbers) / len(numbers), 7, 16)
        fixed, all_at_once = window_lib.Window(40), Cache(room=7_000)
        fixed.drew = lambda request, completion: None
        play(fixed, all_at_once, 2_000)
        self.assertLess(2 * (cache.num_read - num_read), all_at_once.num_read)
        self.assertGreater(window.reread_share(), 0)
        self.assertEqual(window.reread_share(), 0)  # since the last call

    def test_it_grows_again(self):
        window = window_lib.Window(40)
        play(window, Cache(room=3_000), 1_000)
        small = window.limit
        play(window, Cache(room=100_000), 3_000)
        self.assertLess(small, 10)
        self.assertEqual(window.limit, 40)

    def test_nothing_changes_where_texts_stay(self):
        window = window_lib.Window(12)
        self.assertEqual({*play(window, Cache(room=100_000), 500)}, {12})
        self.assertEqual(window.reread_share(), 0)

    def test_new_weights_that_read_texts_again_are_no_lack_of_room(self):
        class Renewed(Cache):
            def turn(self, episode, request, version=0):
                self._texts.clear()
                return super().turn(episode, request, version)

        window = window_lib.Window(12)
        play(window, Renewed(room=100_000), 500, version=lambda turn: turn)
        self.assertEqual(window.limit, 12)

    def test_new_weights_within_a_turn_are_no_lack_of_room(self):
        """What old weights have read is not shared with requests of new ones."""
        window = window_lib.Window(1)
        window.began(0)
        for id, read_by in ((0, [0, 0]), (1, [1, 1])):
            completion = requests.Completion(
                [7, 8], [0.0] * 2, "stop", [id, 1], cache_versions=read_by
            )
            window.drew(requests.Request(id, [1] * (500 + id), 2), completion)
        self.assertEqual((window.limit, window.reread_share()), (1, 0))

    def test_a_turn_that_ends_after_its_episode_leaves_nothing(self):
        window = window_lib.Window(4)
        window.began(0)
        window.ended(0, MAX_TURNS)
        completion = requests.Completion([7], [0.0], "stop", [0])
        window.drew(requests.Request(2, [1] * 500, 1), completion)
        self.assertEmpty(window._texts)

    def test_a_history_that_was_rewritten_is_not_known(self):
        window = window_lib.Window(2)
        window.began(0)
        for id, prompt in ((0, [1] * 500), (1, [2] * 500), (2, [2] * 600)):
            completion = requests.Completion([7], [0.0], "stop", [0], num_cached=0)
            window.drew(requests.Request(id, prompt, 1), completion)
            self.assertEqual(window.reread_share() > 0, id == 2)

    def test_a_part_of_a_page_is_not_lost(self):
        window = window_lib.Window(1)
        window.began(0)
        for id, found in ((0, 0), (1, 500 - 64), (2, 501 - 65)):
            completion = requests.Completion([7], [0.0], "stop", [0], num_cached=found)
            window.drew(requests.Request(id, [1] * (500 + id), 1), completion)
            share = window.reread_share()
            self.assertEqual(share, 1 / 501 if id == 2 else 0)

    def test_episodes_with_neighbouring_ids_are_apart(self):
        """The id before an episode's first is the last of another episode's."""
        window = window_lib.Window(8)
        for first in range(100):
            window.began(first)
            completion = requests.Completion([7], [0.0], "stop", [0])
            window.drew(requests.Request(first, [1] * 500, 1), completion)
            if first % 2:
                window.ended(first, 1)
        self.assertEqual((window.limit, window.reread_share()), (8, 0))

    def test_episodes_that_ended_leave_nothing(self):
        window = window_lib.Window(4)
        play(window, Cache(room=3_000), 400)
        self.assertLessEqual(len(window._texts), 5)
        self.assertLessEqual(len(window._firsts), 5)

    def test_one_episode_may_always_run(self):
        window = window_lib.Window(4)
        play(window, Cache(room=100), 400)
        self.assertEqual(window.limit, 1)


if __name__ == "__main__":
    environment.main()
