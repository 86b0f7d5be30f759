"""What can be seen of a page: ink of texts, contrast, whitespace."""

import numpy as np
from jaxtyping import Bool, Float, UInt8

from glm5_jax.environments.worlds.slides import measure

_VISIBLE = 24  # least difference of a channel, of 255
_TILE = 80  # pixels; 16 by 9 of them make a slide
_BUSY = 40  # least range within a tile that has something


def is_inked(facts: measure.Facts, box: measure.Box, num_letters: int) -> bool:
    """Returns whether a word can be seen from its first letter to its last.

    Its box is cut into a column for each letter, and glyphs must show in most. A box
    that is filled all over is no word.
    """
    changed = _change(facts, box) >= _VISIBLE
    if not changed.any() or changed.mean() > 0.75:
        return False
    columns = np.array_split(changed.any(axis=0), min(num_letters, changed.shape[1]))
    return float(np.mean([column.any() for column in columns])) >= 0.7


def contrast(facts: measure.Facts, box: measure.Box) -> float:
    """Returns WCAG's contrast of a word's glyphs with what is behind them, 1 to 21."""
    change = _change(facts, box)
    if change.size == 0 or change.max() < 1:
        return 1.0
    # Glyphs have soft edges: the strongest twentieth of what changed is their inside.
    strong = change >= np.quantile(change[change > 0], 0.95)
    seen, bare = (
        _luminance(_part(pixels, box)[strong]) for pixels in (facts.seen, facts.bare)
    )
    high, low = np.maximum(seen, bare), np.minimum(seen, bare)
    return float(np.median((high + 0.05) / (low + 0.05)))


def fill(pixels: UInt8[np.ndarray, "height width 3"]) -> tuple[float, float]:
    """Returns the share of tiles with something, and that of the largest empty box."""
    high, wide = (size // _TILE for size in pixels.shape[:2])
    rows = pixels[: high * _TILE, : wide * _TILE].reshape(high, _TILE, -1)
    most, least = (
        extreme(side.reshape(high, wide, _TILE, 3), axis=2).astype(int)
        for extreme, side in ((np.max, rows.max(axis=1)), (np.min, rows.min(axis=1)))
    )
    is_busy = (most - least).max(axis=-1) >= _BUSY
    return float(is_busy.mean()), _largest(~is_busy) / is_busy.size


def _largest(empty: Bool[np.ndarray, "rows columns"]) -> int:
    """Returns the area of the largest box of empty tiles."""
    most = 0
    for top in range(len(empty)):
        column = np.ones(empty.shape[1], bool)
        for bottom in range(top, len(empty)):
            column &= empty[bottom]
            run = longest = 0
            for is_empty in column:
                run = run + 1 if is_empty else 0
                longest = max(longest, run)
            most = max(most, longest * (bottom - top + 1))
    return most


def _change(
    facts: measure.Facts, box: measure.Box
) -> UInt8[np.ndarray, "rows columns"]:
    """Returns how much the glyphs of a box change its pixels."""
    seen, bare = (_part(p, box).astype(int) for p in (facts.seen, facts.bare))
    change = np.abs(seen - bare)
    return change.max(axis=-1, initial=0).astype(np.uint8)


def _part(
    pixels: UInt8[np.ndarray, "height width 3"], box: measure.Box
) -> UInt8[np.ndarray, "rows columns 3"]:
    left, top, right, bottom = (max(round(side), 0) for side in box)
    return pixels[top:bottom, left:right]


def _luminance(colours: UInt8[np.ndarray, "any 3"]) -> Float[np.ndarray, " any"]:
    """Returns WCAG 2's relative luminance."""
    part = colours / 255
    linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])
