"""Documents to rows of equal length in which they do not see each other."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

Row = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Documents one after the other, cut into rows that are made when asked for.

    A row has, for each of its tokens, `tokens`, `targets` (the document's next token;
    eos after its last), `segment_ids` (1, 2, ... by document; 0 is padding),
    `positions` (from 0 for each document in the row), `loss_mask` (0 on padding). So
    every token but the first of a document is a target once, and eos is never read. A
    document that does not fit goes on in the next row, without what came before it.

    Attributes:
        tokens: all documents.
        starts: where each document begins in `tokens`; none is empty.
        eos_id: target after a document's last token; also what padding is filled with.
        sequence_length: tokens in a row; the last row is padded.
    """

    tokens: Int[np.ndarray, " n"]
    starts: Int[np.ndarray, " documents"]
    eos_id: int
    sequence_length: int

    def __len__(self) -> int:
        """Number of rows, the padded one included."""
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
        targets = np.append(self.tokens[begin + 1 : end + 1], self.eos_id)
        targets = targets[: end - begin]
        targets[cuts - 1] = self.eos_id
        if last < self.starts.size and self.starts[last] == end:
            targets[-1] = self.eos_id
        padded_segments = self._pad(segment_ids, 0)
        return {
            "tokens": self._pad(self.tokens[begin:end], self.eos_id),
            "targets": self._pad(targets, self.eos_id),
            "loss_mask": (padded_segments > 0).astype(np.float32),
            "segment_ids": padded_segments,
            "positions": self._pad(np.arange(end - begin) - piece_starts, 0),
        }

    def _pad(self, values: np.ndarray, filler: int) -> np.ndarray:
        padded = np.full(self.sequence_length, filler, np.int32)
        padded[: values.size] = values
        return padded


def pack(
    documents: Sequence[Int[np.ndarray, " _"]], *, eos_id: int, sequence_length: int
) -> PackedRows:
    """Packs the token ids of documents in the order given."""
    documents = [document for document in documents if document.size]
    ends = np.cumsum([document.size for document in documents], dtype=np.int64)
    return PackedRows(
        tokens=np.concatenate(documents),
        starts=np.concatenate(([0], ends[:-1])),
        eos_id=eos_id,
        sequence_length=sequence_length,
    )
