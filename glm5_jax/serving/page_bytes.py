"""Writes pages of a cache as bytes, and reads and checks them.

8 bytes with the length of a head, the head in JSON, then the arrays one after the
other. The digest in the head covers all other fields of it, the token ids of the text
and the arrays, so that neither damaged pages nor those of another text are taken.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from glm5_jax.inference import handover

MAX_HEAD = 2**16  # bytes
_WORD = 8  # bytes of the head's length
_ORDER = "little"


class DamageError(ValueError):
    """Raised if bytes are not the pages that were asked for."""


def encoded(
    pages: handover.Pages, form: handover.Form, tokens: Sequence[int]
) -> list[memoryview]:
    """Returns the parts of the bytes of pages, without a copy of the arrays.

    Args:
        pages: as `handover.copy` returned them.
        form: of a page.
        tokens: of the text.
    """
    parts = [_bytes_of(pages.arrays[name]) for name in sorted(form.arrays)]
    head: dict[str, Any] = {
        "mark": pages.mark,
        "weight_version": pages.version,
        "first_page": pages.first,
        "num_pages": pages.number,
        "form": form.described,
    }
    last = (pages.first + pages.number) * form.page_size
    head["digest"] = _digest(head, tokens[:last], parts)
    text = json.dumps(head).encode()
    size = len(text).to_bytes(_WORD, _ORDER)
    return [memoryview(size + text), *parts]


def most_bytes(form: handover.Form, num_pages: int) -> int:
    """Returns the most bytes that these pages take."""
    return _WORD + MAX_HEAD + num_pages * form.page_bytes


def decoded(
    data: bytes | bytearray, form: handover.Form, tokens: Sequence[int], first: int
) -> handover.Pages:
    """Returns the pages in bytes of `encoded`.

    Args:
        data: of another server.
        form: of the pages of this one.
        tokens: of the text.
        first: number of the first page that was asked for.

    Raises:
        DamageError: they are not pages of this form and text.
    """
    end = _WORD + int.from_bytes(data[:_WORD], _ORDER)
    try:
        head: dict[str, Any] = json.loads(data[_WORD : min(end, _WORD + MAX_HEAD)])
        digest = head.pop("digest")
        number, mark, version = (
            head[name] for name in ("num_pages", "mark", "weight_version")
        )
        is_right = head["form"] == form.described and head["first_page"] == first
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise DamageError("They do not begin with a head of pages.") from None
    if not is_right:
        raise DamageError(
            "They are other pages than those asked for, or have other shapes or types; "
            "start all servers with the same model and settings."
        )
    is_counted = isinstance(number, int) and isinstance(version, int)
    if not is_counted or len(data) - end != number * form.page_bytes:
        raise DamageError("They are cut off.")
    view, arrays, at = memoryview(data), {}, end
    parts = []
    for name, one in sorted(form.arrays.items()):
        shape = one.shape[0], number, *one.shape[2:]
        size = math.prod(shape) * one.dtype.itemsize
        parts.append(view[at : at + size])
        arrays[name] = np.frombuffer(parts[-1], one.dtype).reshape(shape)
        at += size
    last = (first + number) * form.page_size
    if last > len(tokens) or digest != _digest(head, tokens[:last], parts):
        raise DamageError("Their digest is wrong.")
    return handover.Pages(str(mark), version, first, arrays)


def _bytes_of(array: np.ndarray) -> memoryview:
    """Returns the bytes of an array; types of ml_dtypes have no buffers."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1).data


def _digest(
    head: dict[str, Any], tokens: Sequence[int], parts: Sequence[memoryview]
) -> str:
    """Returns the digest of a head without it, a text and arrays."""
    digest = hashlib.blake2b(json.dumps(head, sort_keys=True).encode(), digest_size=32)
    digest.update(np.asarray(tokens, "<u4").tobytes())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
