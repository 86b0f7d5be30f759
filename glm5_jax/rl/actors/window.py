"""Adapts the number of episodes under way to the cache of the engines.

Between its turns an episode's text stays in the cache while there is room. Of too many
episodes each takes the room of another, every turn reads its whole text again, and more
episodes are slower than fewer. So the number is found as TCP finds its own: one more
where texts stay, a quarter fewer where they are lost (Chiu and Jain, "Analysis of the
Increase and Decrease Algorithms for Congestion Avoidance", 1989).
"""

import dataclasses

from glm5_jax.inference import prefixes, requests

_LOST = 0.1  # share of the known tokens that are read again, above which is too much
_FEWER = 0.75  # the number after that, as a share of the one before
_PAGE = 64  # tokens that a cache may forget of any text: it keeps whole pages


@dataclasses.dataclass(frozen=True)
class _Text:
    """What an engine has read and drawn for an episode."""

    encoded: bytes
    version: int  # of the oldest weights that have read it


class Window:
    """The most episodes that may be under way."""

    def __init__(self, most: int) -> None:
        """Begins with `most`, which is never exceeded."""
        self._most = self.limit = most
        self._firsts: set[int] = set()  # ids of the first turns of episodes under way
        self._texts: dict[int, _Text] = {}  # by id of the episode's last request
        self._num_turns = self._known = self._lost = 0  # since the limit's last change
        self._all_known = self._all_lost = 0  # since `reread_share`

    def began(self, first: int) -> None:
        """Notes an episode, by the id of its first turn; those of others count on."""
        self._firsts.add(first)

    def drew(self, request: requests.Request, completion: requests.Completion) -> None:
        """Notes a turn."""
        if not completion.tokens:
            return
        before = self._texts.pop(request.id - 1, None)
        if request.id in self._firsts:
            before = None  # the last turn of another episode
        elif before is None:  # a turn of an episode that has ended
            return
        prompt = prefixes.encoded(request.prompt)
        drawn = prefixes.encoded(completion.tokens[:-1])  # the last was never read
        read_by = completion.cache_versions or completion.versions
        text = _Text(prompt + drawn, read_by[-1])
        self._texts[request.id] = text
        # New weights read every text again.
        if before is not None and before.version == completion.versions[0]:
            known = prefixes.common(before.encoded, prompt)
            self._note(known, max(known - completion.num_cached - _PAGE, 0))

    def ended(self, first: int, count: int) -> None:
        """Forgets an episode, by the id of its first turn and its most turns."""
        self._firsts.discard(first)
        for id in range(first, first + count):
            self._texts.pop(id, None)

    def reread_share(self) -> float:
        """Returns the share of known tokens read again, since the last call."""
        share = self._all_lost / max(self._all_known, 1)
        self._all_known = self._all_lost = 0
        return share

    def _note(self, known: int, lost: int) -> None:
        """Counts a turn; after as many as episodes may be under way, moves the limit.

        So episodes that are too many have time to end before it moves again.
        """
        self._all_known, self._all_lost = self._all_known + known, self._all_lost + lost
        self._known, self._lost = self._known + known, self._lost + lost
        self._num_turns += 1
        if self._num_turns < self.limit:
            return
        if self._lost > _LOST * self._known:
            self.limit = max(int(self.limit * _FEWER), 1)
        else:
            self.limit = min(self.limit + 1, self._most)
        self._num_turns = self._known = self._lost = 0
