"""How the bytes of a window are stored: as they are, or as what changed.

At the learning rates of reinforcement learning few of the bfloat16 weights change in a
step. The exclusive or with the version before is then mostly zeros, which compress to a
few percent (arXiv 2602.03839 has the shares). zlib is in every Python; zstandard would
take two thirds of its bytes and half of its time.
"""

import zlib

import numpy as np
from jaxtyping import UInt8

Bytes = UInt8[np.ndarray, " n"]
Stored = UInt8[np.ndarray, " bytes"]

RAW = "raw"
SAME = "same"  # as in the base, no bytes
CHANGES = "xor+zlib"
WORTH = 0.75  # of the bytes; changes that take more are stored raw, without a base
_TRIED = 2**18  # bytes at the middle that are compressed to see whether it is worth it


def encode(new: Bytes, old: Bytes | None) -> tuple[str, Stored]:
    """Returns the coding and the stored bytes of a window.

    Args:
      new: its bytes.
      old: its bytes in the base; None if it has none.
    """
    if old is None:
        return RAW, new
    changes = np.bitwise_xor(new, old)
    if not changes.any():
        return SAME, np.zeros(0, np.uint8)
    middle = max(len(changes) - _TRIED, 0) // 2
    tried = changes[middle : middle + _TRIED]
    if len(_compressed(tried)) > WORTH * len(tried):
        return RAW, new
    stored = _compressed(changes)
    return (RAW, new) if len(stored) > WORTH * len(new) else (CHANGES, stored)


def decode(coding: str, stored: Stored, old: Bytes | None, size: int) -> np.ndarray:
    """Returns the bytes of a window.

    Args:
      coding: that `encode` chose.
      stored: the bytes that it returned.
      old: the window's bytes in the base, unless the coding is RAW.
      size: of the window.

    Raises:
      ValueError: the stored bytes are damaged, or the coding is unknown.
    """
    if coding == RAW:
        return stored
    if old is None:
        raise ValueError(f"a window coded as {coding!r} needs its base")
    if coding == SAME:
        return old
    if coding != CHANGES:
        raise ValueError(f"the coding {coding!r} is of a later version of glm5_jax")
    return np.bitwise_xor(_restored(stored, size), old)


def _compressed(changes: Bytes) -> Stored:
    return np.frombuffer(zlib.compress(changes.data, 1), np.uint8)


def _restored(stored: Stored, size: int) -> np.ndarray:
    """Returns bytes of this number, and never makes more of them."""
    try:
        found = zlib.decompressobj().decompress(stored.data, size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(found) != size:
        raise ValueError(f"{len(found)} bytes instead of {size}")
    return np.frombuffer(found, np.uint8)
