"""Packing: documents to rows of equal length, in which they do not see each other."""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int

Row = dict[str, np.ndarray]


@runtime_checkable
class Rows(Protocol):
    """A sequence of rows, in memory or on disk; rows after the last are padding."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def __getitem__(self, index: int) -> Row:
        """Row `index`."""
        ...


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Documents joined and cut into rows, which are made on demand.

    A row has, for each of its tokens, `tokens`, `targets` (the document's next token;
    eos after its last), `segment_ids` (1, 2, ... by document; 0 is padding),
    `positions` (from 0 for each document in the row), `loss_mask` (0 on padding). Every
    token but the first of a document is a target once, and eos is never an input. A
    document that does not fit continues in the next row, which does not see its start.

    Attributes:
        tokens: all documents.
        starts: where each document begins in `tokens`; none is empty.
        eos_id: target after a document's last token; also fills padding.
        sequence_length: tokens in a row; the last row is padded.
    """

    tokens: Int[np.ndarray, " n"]
    starts: Int[np.ndarray, " documents"]
    eos_id: int
    sequence_length: int

    def __len__(self) -> int:
        """Returns the number of rows, including the padded one."""
        return -(-self.tokens.size // self.sequence_length)

    def __getitem__(self, index: int) -> Row:
        """Row `index`; one beyond the last is all padding."""
        size = self.tokens.size
        begin = min(index * self.sequence_length, size)
        end = min(begin + self.sequence_length, size)
        # starts[first:last] are the documents that begin inside the row.
        first, last = np.searchsorted(self.starts, [begin + 1, end])
        cuts = self.starts[first:last] - begin
        lengths = np.diff(cuts, prepend=0, append=end - begin)
        segment_ids = np.repeat(np.arange(1, lengths.size + 1), lengths)
        piece_starts = np.repeat(np.concatenate(([0], cuts)), lengths)
        targets = self._pad(self.tokens[begin + 1 : end + 1], self.eos_id)
        targets[cuts - 1] = self.eos_id
        if last < self.starts.size and self.starts[last] == end:
            targets[-1] = self.eos_id
        padded_segments = self._pad(segment_ids, 0)
        return {
            "tokens": self._pad(self.tokens[begin:end], self.eos_id),
            "targets": targets,
            "loss_mask": (padded_segments > 0).astype(np.float32),
            "segment_ids": padded_segments,
            "positions": self._pad(np.arange(end - begin) - piece_starts, 0),
        }

    def _pad(self, values: np.ndarray, filler: int) -> np.ndarray:
        padded = np.full(self.sequence_length, filler, np.int32)
        padded[: values.size] = values
        return padded


@dataclasses.dataclass(frozen=True)
class FittedRows:
    """Whole documents with a loss mask, several in a row, placed by `best_fit`.

    Rows have the same arrays as PackedRows'. A document of n tokens takes n - 1 places,
    because its last token is only a target; loss_mask is 1 where the target is trained.

    Attributes:
        tokens: all documents, each of at least 2 and at most sequence_length + 1.
        mask: which tokens are trained.
        starts: where each document begins in `tokens`, and the end of the last.
        bins: the documents of each row.
        eos_id: fills padding.
        sequence_length: tokens in a row.
    """

    tokens: Int[np.ndarray, " n"]
    mask: Bool[np.ndarray, " n"]
    starts: Int[np.ndarray, " borders"]
    bins: Sequence[Sequence[int]]
    eos_id: int
    sequence_length: int

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.bins)

    def __getitem__(self, index: int) -> Row:
        """Row `index`; one beyond the last is all padding."""
        row: Row = {
            "tokens": np.full(self.sequence_length, self.eos_id, np.int32),
            "targets": np.full(self.sequence_length, self.eos_id, np.int32),
            "loss_mask": np.zeros(self.sequence_length, np.float32),
            "segment_ids": np.zeros(self.sequence_length, np.int32),
            "positions": np.zeros(self.sequence_length, np.int32),
        }
        begin = 0
        for segment, document in enumerate(
            self.bins[index] if index < len(self.bins) else (), start=1
        ):
            first, last = self.starts[document], self.starts[document + 1] - 1
            place = slice(begin, begin + last - first)
            row["tokens"][place] = self.tokens[first:last]
            row["targets"][place] = self.tokens[first + 1 : last + 1]
            row["loss_mask"][place] = self.mask[first + 1 : last + 1]
            row["segment_ids"][place] = segment
            row["positions"][place] = np.arange(last - first)
            begin = place.stop
        return row


def pack(
    documents: Sequence[Int[np.ndarray, " _"]], *, eos_id: int, sequence_length: int
) -> PackedRows:
    """Packs the token ids of documents in the given order."""
    documents = [document for document in documents if document.size]
    ends = np.cumsum([document.size for document in documents], dtype=np.int64)
    return PackedRows(
        tokens=np.concatenate(documents),
        starts=np.concatenate(([0], ends[:-1])),
        eos_id=eos_id,
        sequence_length=sequence_length,
    )


def fit(
    documents: Sequence[tuple[Int[np.ndarray, " _"], Bool[np.ndarray, " _"]]],
    *,
    eos_id: int,
    sequence_length: int,
) -> FittedRows:
    """Packs whole documents, each (tokens, mask); their order breaks ties."""
    sizes = [tokens.size for tokens, _ in documents]
    return FittedRows(
        tokens=np.concatenate([tokens for tokens, _ in documents]),
        mask=np.concatenate([mask for _, mask in documents]),
        starts=np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))),
        bins=best_fit([size - 1 for size in sizes], sequence_length),
        eos_id=eos_id,
        sequence_length=sequence_length,
    )


def pieces(
    ids: Int[np.ndarray, " n"], sequence_length: int
) -> list[Int[np.ndarray, " _"]]:
    """Cuts a document into pieces that fit a row (Ding et al., arXiv 2404.10830).

    The last token of a piece is also the first of the next one, so that every token but
    the first is a target once.
    """
    starts = range(0, ids.size - 1, sequence_length)
    return [ids[start : start + sequence_length + 1] for start in starts]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Puts things into bins: the longest first, each where it leaves the least room.

    Best-fit decreasing (Johnson 1973): at most 11/9 of the fewest bins, plus 4. Equal
    lengths keep their order; among equal rooms the newest bin is used.

    Args:
        lengths: lengths of the things, each at most `capacity`.
        capacity: length of a bin.

    Returns:
        For each bin the indices of its things, in the order they were put in.
    """
    assert all(length <= capacity for length in lengths)
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # keys of by_room that have a bin, ascending
    for thing in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(rooms, lengths[thing])
        if at < len(rooms):
            room = rooms[at]
            chosen = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(at)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(thing)
        left = room - lengths[thing]
        if not by_room.setdefault(left, []):
            bisect.insort(rooms, left)
        by_room[left].append(chosen)
    return bins
