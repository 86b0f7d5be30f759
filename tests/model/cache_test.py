"""The cache's reader against numpy, at the ends of sequences and of pages."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax.model import cache as cache_lib
from glm5_jax.model import cached
from tests import environment
from tests.model import tiny

LAYERS, CAPACITY, WIDTH, LAYER = 3, 6, 2, 1
LENGTHS = np.array([1, 2, 3, 5])  # three tokens more: within, to and beyond the end
NEW = 3
SLOTS = np.array([3, 0, 2, 1])
# Pages of two rows; 9 marks a run of rows without a page.
TABLE = np.array([[4, 7, 9], [4, 0, 1], [5, 3, 8], [2, 6, 9]])


def make(form, lengths=LENGTHS):
    """Returns a reader at LAYER, its entry, and each sequence's pages, rows of one."""
    shape = (LAYERS, 9, 2, WIDTH) if form == "pages" else (LAYERS, 4, CAPACITY, WIDTH)
    entry = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    pages = {"pages": TABLE, "slots": SLOTS[:, None], "all": np.arange(4)[:, None]}
    of_slots = np.empty_like(lengths)
    of_slots[SLOTS] = lengths
    cache = cache_lib.Cache(
        entries={"kv": jnp.asarray(entry)},
        lengths=jnp.asarray(of_slots if form == "slots" else lengths),
        capacity=CAPACITY,
        table=jnp.asarray(TABLE) if form == "pages" else None,
    )
    slots = jnp.asarray(SLOTS) if form == "slots" else None
    layers = {"kv": jnp.asarray(LAYER), "state": jnp.asarray(0)}
    return cache_lib.Reader(cache, slots, layers, None), entry, pages[form]


def rows_of(entry, pages):
    """Returns the rows [CAPACITY, WIDTH] of a sequence; the last page stands in."""
    return np.concatenate([entry[LAYER, min(p, entry.shape[1] - 1)] for p in pages])


class ReaderTest(parameterized.TestCase):
    @parameterized.product(form=["all", "slots", "pages"], size=[1, 4, CAPACITY])
    def test_the_last_rows_end_with_the_new_tokens(self, form, size):
        reader, entry, pages = make(form)
        got, first = jax.jit(lambda r: r.latest("kv", size, NEW))(reader)
        for b, length in enumerate(LENGTHS):
            start = min(max(length + NEW - size, 0), CAPACITY - size)
            self.assertEqual(first[b], start)
            wanted = rows_of(entry, pages[b])[start : start + size]
            np.testing.assert_array_equal(got[b], wanted)

    @parameterized.parameters("all", "slots", "pages")
    def test_new_rows_follow_the_cached_ones(self, form):
        """Rows beyond a sequence or its pages are dropped; all others stay."""
        reader, entry, pages = make(form)
        rows = -1.0 - np.arange(4 * NEW * WIDTH).reshape(4, NEW, WIDTH)
        reader = jax.jit(lambda r, rows: r.append("kv", rows))(reader, rows)
        wanted = entry.copy()
        per_page = entry.shape[2]
        for b, t in np.ndindex(4, NEW):
            place = LENGTHS[b] + t
            if place < CAPACITY and (page := pages[b][place // per_page]) < 9:
                wanted[LAYER, page, place % per_page] = rows[b, t]
        np.testing.assert_array_equal(reader.cache.entries["kv"], wanted)

    @parameterized.parameters("all", "slots", "pages")
    def test_whole_sequences(self, form):
        reader, entry, pages = make(form)
        got = jax.jit(lambda r: r.sequences("kv"))(reader)
        wanted = [rows_of(entry, own) for own in pages]
        np.testing.assert_array_equal(got, wanted)

    @parameterized.parameters("all", "slots")
    def test_an_entry_is_replaced(self, form):
        reader, entry, pages = make(form)
        values = -np.ones((4, CAPACITY, WIDTH)) * np.arange(1, 5)[:, None, None]
        made = jax.jit(lambda r, x: r.replace("kv", x))(reader, values)
        wanted = entry.copy()
        wanted[LAYER, pages[:, 0]] = values
        np.testing.assert_array_equal(made.cache.entries["kv"], wanted)

    @parameterized.parameters("all", "slots", "pages")
    def test_pages_of_all_layers_lie_one_after_another(self, form):
        reader, entry, pages = make(form)
        stack, table = jax.jit(lambda r: r.pages("kv"))(reader)
        for own, numbers in zip(pages, table, strict=True):
            found = np.concatenate(np.asarray(stack)[numbers])
            np.testing.assert_array_equal(found, rows_of(entry, own))

    def test_a_layer_counts_the_entries_that_it_has(self):
        reader, _, _ = make("all")
        layers = reader.after({"kv": 0}).layers
        self.assertEqual({k: int(n) for k, n in layers.items()}, {"kv": 2, "state": 0})


class SizeTest(parameterized.TestCase):
    def test_rows_of_layers_and_of_drafts_if_asked_for(self):
        """Latents of 12 + 8 numbers, and keys of an indexer of 16."""
        config = tiny.model()
        self.assertEqual(cached.num_layers_with(config), {"kv": 3, "k_index": 3})
        self.assertEqual(cached.bytes_per_token(config), 3 * (20 + 16) * 4)
        more = cached.bytes_per_token(config, with_mtp=True)
        self.assertEqual(more, 4 * (20 + 16) * 4)
        for options, kv in (
            ({}, (3, 2, 8, 20)),
            ({"with_mtp": True}, (4, 2, 8, 20)),
            ({"pages": (7, 4)}, (3, 7, 4, 20)),
        ):
            cache = cached.empty(config, 2, 8, **options)
            shapes = {name: x.shape for name, x in cache.entries.items()}
            self.assertEqual(shapes, {"kv": kv, "k_index": (*kv[:3], 16)})
            self.assertEqual((cache.lengths.shape, cache.capacity), ((2,), 8))


if __name__ == "__main__":
    environment.main()
