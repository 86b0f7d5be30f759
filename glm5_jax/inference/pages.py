"""Shares pages of the cache among sequences that begin alike: a radix tree of pages.

Every page holds the rows of page_size tokens. A full page, all of whose tokens one
version of the weights has read, becomes a node of the tree, below the node of the page
before it. A prompt begins with the longest path of nodes that spells its tokens,
whichever request read them. A page is free, or one slot owns it, or it is in the tree.
Pages of the tree that no slot uses are kept until pages run out; then the least
recently used leaf goes first: to host memory, if there is room, and back to a page of
the device when a prompt begins with it. Host memory keeps what left last.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple


@dataclasses.dataclass(eq=False)
class Node:
    """A full page that any sequence with these first tokens may use."""

    page: int = -1  # of the device, unless it is in host memory
    parent: "Node | None" = None
    key: tuple[int, ...] = ()  # the page's tokens
    children: dict[tuple[int, ...], "Node"] = dataclasses.field(default_factory=dict)
    num_users: int = 0  # slots
    is_current: bool = True  # False: older weights read it
    experts: Any = None  # of its tokens, where they are recorded
    host: int = -1  # page of the host memory; -1: on the device


class Move(NamedTuple):
    """A copy of a page that must precede the next dispatch, after older moves."""

    to_host: bool
    page: int
    host: int  # page of the host memory


class Pool:
    """The pages of one device."""

    def __init__(self, num_pages: int, page_size: int, num_hosted: int) -> None:
        """Makes free pages of `page_size` tokens each, and some in host memory."""
        self.num_pages, self.page_size = num_pages, page_size
        self.moves: collections.deque[Move] = collections.deque()
        self._free_hosted = [*range(num_hosted)]
        # Nodes in host memory that no slot is about to use. They follow their children.
        self._hosted: collections.OrderedDict[Node, None] = collections.OrderedDict()
        self._free = [*range(num_pages)]
        self._root = Node()
        # Nodes that no slot uses, the least recently used first. A slot lets go of its
        # last page first, so that a node always comes after its children.
        self._idle: collections.OrderedDict[Node, None] = collections.OrderedDict()

    @property
    def num_available(self) -> int:
        """Returns the number of pages that `take` can give."""
        return len(self._free) + len(self._idle)

    def match(self, tokens: Sequence[int]) -> list[Node]:
        """Returns the nodes of the longest prefix in the tree."""
        found, node, size = [], self._root, self.page_size
        for start in range(0, len(tokens), size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def hold(self, nodes: Sequence[Node]) -> None:
        """Makes a slot a user of these nodes."""
        for node in nodes:
            self._idle.pop(node, None)
            self._hosted.pop(node, None)
            node.num_users += 1

    def restore(self, nodes: Sequence[Node]) -> None:
        """Gives pages to nodes in host memory, which a slot uses."""
        for node in nodes:
            if node.host >= 0:
                page = self.take()
                assert page is not None, "the slot waits until there are pages"
                self.moves.append(Move(False, page, node.host))
                self._free_hosted.append(node.host)
                node.page, node.host = page, -1

    def let_go(self, nodes: Sequence[Node]) -> None:
        """Ends a slot's use of these nodes, which are a path from the root."""
        for node in reversed(nodes):
            node.num_users -= 1
            if node.num_users == 0:
                if node.host >= 0:
                    self._hosted[node] = None
                elif node.is_current:
                    self._idle[node] = None
                else:
                    self._free.append(node.page)

    def take(self) -> int | None:
        """Returns a page for a slot, the least recently used one if none is free."""
        if self._free:
            return self._free.pop()
        if not self._idle:
            return None
        node, _ = self._idle.popitem(last=False)
        page, host = node.page, self._take_hosted()
        if host is None:
            _remove(node)
        else:
            self.moves.append(Move(True, page, host))
            node.host = host
            self._hosted[node] = None
        return page

    def give_back(self, pages: Sequence[int]) -> None:
        """Takes back pages that a slot owned."""
        self._free.extend(pages)

    def add(self, path: Sequence[Node], tokens: Sequence[int], page: int) -> Node:
        """Puts a slot's full page into the tree, and makes the slot a user of it.

        If another slot was first, its page is used, and this one becomes free.

        Args:
          path: nodes of the slot's pages before it.
          tokens: of the page.
          page: owned by the slot.
        """
        parent, key = path[-1] if path else self._root, tuple(tokens)
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(page, parent, key)
        elif node.host >= 0:  # read again meanwhile
            self._free_hosted.append(node.host)
            node.page, node.host = page, -1
        else:
            self._free.append(page)
        self.hold([node])
        return node

    def adopt(self, tokens: Sequence[int], first: int) -> tuple[int, list[Node]]:
        """Puts pages of another engine into host memory, as far as there is room.

        Args:
          tokens: of whole pages, from the first of the text.
          first: number of the first page whose rows there are.

        Returns:
          The number of pages that were known, and the new nodes behind them. There are
          none if a page before `first` is missing here.
        """
        path, size = self.match(tokens), self.page_size
        num_known = len(path)
        self.hold(path)
        for start in range(num_known * size, len(tokens), size):
            host = self._take_hosted() if num_known >= first else None
            if host is None:
                break
            parent, key = path[-1] if path else self._root, tuple(tokens[start:][:size])
            node = Node(parent=parent, key=key, num_users=1, host=host)
            parent.children[key] = node
            path.append(node)
        self.let_go(path)
        return num_known, path[num_known:]

    def renew(self) -> None:
        """Empties the tree, as other weights will read; slots keep what they use."""
        todo = [*self._root.children.values()]
        while todo:
            node = todo.pop()
            node.is_current = False
            todo += node.children.values()
        self._free.extend(node.page for node in self._idle)
        self._free_hosted.extend(node.host for node in self._hosted)
        self._idle.clear()
        self._hosted.clear()
        self._root = Node()

    def _take_hosted(self) -> int | None:
        """Returns a page of the host memory, that of the oldest node if none is free.

        Returns None if there is no host memory.
        """
        if self._free_hosted:
            return self._free_hosted.pop()
        if not self._hosted:
            return None
        node, _ = self._hosted.popitem(last=False)
        _remove(node)
        return node.host


def _remove(node: Node) -> None:
    """Takes a leaf out of the tree."""
    assert node.parent is not None
    assert not node.children
    del node.parent.children[node.key]
