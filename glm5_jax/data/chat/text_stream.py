"""Text of token ids that arrive one by one."""

import codecs

from glm5_jax.data import tokenizer as tokenizer_lib

_UNKNOWN = "\ufffd".encode()


class TextStream:
    """Decodes ids to text as they come; a character may span several ids.

    The texts of all calls, joined, are `Tokenizer.spell` of all ids, or without
    `is_spelt` their `Tokenizer.decode`.
    """

    def __init__(
        self, tokenizer: tokenizer_lib.Tokenizer, *, is_spelt: bool = False
    ) -> None:
        """Starts an empty text.

        Args:
            tokenizer: the tokenizer of the ids.
            is_spelt: spells special tokens out; otherwise they have no text.
        """
        self._pieces = tokenizer.pieces
        special = tokenizer.special_ids if is_spelt else {}
        self._names = {i: name for name, i in special.items()}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, id: int) -> str:
        """Returns the text that one more id completes."""
        if (name := self._names.get(id)) is not None:
            return self.close() + name
        is_known = 0 <= id < len(self._pieces)
        return self._decoder.decode(self._pieces[id] if is_known else _UNKNOWN)

    def close(self) -> str:
        """Returns what remains: U+FFFD for a character that was not completed."""
        return self._decoder.decode(b"", final=True)
