"""Reads files of the safetensors library, and damaged files."""

import json
import math
import os
import pathlib
import struct
from unittest import mock

import ml_dtypes
import numpy as np
import safetensors.numpy
from absl.testing import parameterized

from glm5_jax.weights import safetensors_file
from tests import environment
from tests.weights import fp8_folder

RNG = np.random.default_rng(0)
ARRAYS = {
    "matrix": RNG.normal(size=(37, 50)).astype(np.float32),
    "half": RNG.normal(size=(7, 3)).astype(ml_dtypes.bfloat16),
    "codes": RNG.integers(0, 127, (5, 4)).astype(np.uint8).view("V1"),
    "vector": np.arange(11, dtype=np.int64),
    "scalar": np.full((), 3, np.float32),
    "empty": np.zeros((0, 4), np.float16),
    "wide": RNG.normal(size=(3, 5000)).astype(np.float32),
    "cube": RNG.normal(size=(4, 5, 6)).astype(np.float32),
}
ARRAYS["codes"] = ARRAYS["codes"].view(ml_dtypes.float8_e4m3fn)
READ = safetensors_file.Tensor._read


class FileCase(parameterized.TestCase):
    def path(self):
        return pathlib.Path(self.create_tempdir().full_path) / "x.safetensors"

    def assert_damaged(self, path, words=""):
        with self.assertRaisesRegex(safetensors_file.DamagedError, words):
            safetensors_file.read_header(path)


class RoundTripTest(FileCase):
    def test_reads_files_of_the_library(self):
        path = self.path()
        safetensors.numpy.save_file(ARRAYS, path, metadata={"a": "b"})
        tensors = safetensors_file.read_header(path)
        self.assertEqual(set(tensors), set(ARRAYS))
        for name, array in ARRAYS.items():
            values = tensors[name][(slice(None),) * array.ndim]
            self.assertEqual((values.dtype, values.shape), (array.dtype, array.shape))
            self.assertEqual(values.tobytes(), array.tobytes(), name)

    def test_the_library_reads_files_written_in_rows(self):
        path = self.path()
        tensors = safetensors_file.create(
            path, {name: (array.dtype, array.shape) for name, array in ARRAYS.items()}
        )
        self.assertEqual(safetensors_file.read_header(path), tensors)
        for name, array in ARRAYS.items():
            self.assertEqual(tensors[name].offset % array.dtype.itemsize, 0, name)
            starts = range(0, len(array), 5) if array.ndim else [0]
            for row in reversed(starts):  # any order
                part = array[row : row + 5] if array.ndim else array
                tensors[name].write(row, part)
        found = fp8_folder.load_file(path)
        for name, array in ARRAYS.items():
            self.assertEqual(found[name].tobytes(), array.tobytes(), name)
        with self.assertRaises(FileExistsError):
            safetensors_file.create(path, {})

    def test_windows(self):
        path = self.path()
        safetensors.numpy.save_file(ARRAYS, path)
        tensors = safetensors_file.read_header(path)
        rng = np.random.default_rng(1)
        for name in ("matrix", "wide", "vector", "half", "cube"):
            array = ARRAYS[name]
            for _ in range(30):
                window = tuple(
                    slice(*sorted(rng.integers(0, n + 1, size=2))) for n in array.shape
                )
                np.testing.assert_array_equal(tensors[name][window], array[window])

    def shapes_read(self, name, window):
        """Reads a window, and returns the shapes that were read from the file."""
        path = self.path()
        safetensors.numpy.save_file(ARRAYS, path)
        tensor = safetensors_file.read_header(path)[name]
        with mock.patch.object(
            safetensors_file.Tensor, "_read", autospec=True, side_effect=READ
        ) as read:
            got = tensor[window]
        np.testing.assert_array_equal(got, ARRAYS[name][window])
        return [call.args[2] for call in read.mock_calls]

    @parameterized.parameters(
        (1, 1, {1}), (599, 1, {2, 1}), (10**6, 1, {35}), (1, 0, {35})
    )
    def test_columns_are_kept_of_a_bounded_number_of_rows(self, size, left, counts):
        """A row of the matrix has 200 bytes; one that is too large is read alone.

        Whole rows are read at once.
        """
        with mock.patch.object(safetensors_file, "_READ_BYTES", size):
            shapes = self.shapes_read("matrix", np.s_[1:36, left:50])
        self.assertEqual({rows for rows, *_ in shapes}, counts)

    @parameterized.parameters((1249, 3 * 1249), (1250, 3 * 5000))
    def test_a_band_narrower_than_a_quarter_is_read_alone(self, width, num_values):
        shapes = self.shapes_read("wide", np.s_[:, 5 : 5 + width])
        self.assertEqual(sum(map(math.prod, shapes)), num_values)

    def test_a_file_that_shrinks_after_its_check(self):
        path = self.path()
        safetensors.numpy.save_file(ARRAYS, path)
        tensors = safetensors_file.read_header(path)
        os.truncate(path, 2000)
        with self.assertRaisesRegex(safetensors_file.DamagedError, "shorter"):
            for name, array in ARRAYS.items():
                tensors[name][(slice(None),) * array.ndim]


def entry(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


class DamageTest(FileCase):
    def write(self, header, data, length=None):
        path = self.path()
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        length = len(text) if length is None else length
        path.write_bytes(struct.pack("<Q", length) + text + bytes(data))
        return path

    @parameterized.named_parameters(
        ("overlap", {"a": entry(0, 8), "b": entry(4, 12)}, 12, "b begins at"),
        ("same_bytes", {"a": entry(0, 8), "b": entry(0, 8)}, 8, "b begins at"),
        ("gap", {"a": entry(0, 8), "b": entry(12, 20)}, 20, "b begins at"),
        ("late", {"a": entry(4, 12)}, 12, "a begins at"),
        ("outside", {"a": entry(0, 8), "b": entry(8, 16)}, 12, "describes"),
        ("more", {"a": entry(0, 8)}, 12, "describes"),
        ("shape", {"a": entry(0, 8, (3,))}, 8, "contradict its shape"),
        ("huge", {"a": entry(0, 0, (2**62, 4))}, 0, "contradict its shape"),
        ("too_huge", {"a": entry(0, 2**63)}, 8, "a has a bad entry"),
        ("negative", {"a": entry(0, 8, (-2,))}, 8, "a has a bad entry"),
        ("backwards", {"a": entry(8, 0)}, 8, "a has a bad entry"),
        ("float", {"a": entry(0, 8.0)}, 8, "a has a bad entry"),
        ("bool", {"a": entry(0, 4, (True,))}, 4, "a has a bad entry"),
        ("no_shape", {"a": {"dtype": "F32", "data_offsets": [0, 8]}}, 8, "has keys"),
        ("text", {"a": {"dtype": 3, "shape": "2", "data_offsets": [0, 8]}}, 8, ""),
        ("dtype", {"a": entry(0, 8, dtype=3)}, 8, "a has a bad entry"),
        ("one_offset", {"a": entry(0, 8) | {"data_offsets": [0]}}, 8, "broken"),
        ("null", {"a": None}, 8, "broken"),
        ("list", [1], 8, "broken"),
        ("json", b"{", 8, "broken"),
        ("utf8", b'{"\xff": 3}', 8, "broken"),
        ("deep", b"[" * 10**5, 8, "broken"),
        ("digits", b'{"a": ' + b"1" * 5000 + b"}", 8, "broken"),
        ("nothing", b"", 0, "broken"),
    )
    def test_header(self, header, size, words):
        self.assert_damaged(self.write(header, size), words)

    def test_repeated_names_are_refused(self):
        """The safetensors library would read the last one."""
        one = json.dumps({"b": entry(8, 16), "a": entry(0, 8)})[:-1] + ", "
        text = one + json.dumps({"a": entry(0, 8)})[1:]
        self.assert_damaged(self.write(text.encode(), 16), "a occurs twice")

    @parameterized.parameters(0, 3, 8, 10, 2**40, 2**64 - 1)
    def test_length(self, length):
        self.assert_damaged(self.write({"a": entry(0, 8)}, 8, length))

    def test_a_header_has_at_most_100_megabytes(self):
        path = self.write({"a": entry(0, 8)}, 8, 10**8 + 1)
        os.truncate(path, 2 * 10**8)
        self.assert_damaged(path, "at most 100,000,000 are allowed")

    def test_a_file_may_hold_nothing_but_a_header(self):
        path = self.path()
        self.assertEqual(safetensors_file.create(path, {}), {})
        self.assertEqual(safetensors_file.read_header(path), {})
        size = path.stat().st_size
        self.assertEqual(size % 8, 0)  # so that tensors would be aligned
        self.assert_damaged(self.write(b" " * 8, 0, length=9), "at most")

    def test_no_file(self):
        path = self.path()
        self.assert_damaged(path, "No such file")
        self.assert_damaged(path.parent, "not a regular file")
        os.mkfifo(path)  # opening it would block forever
        self.assert_damaged(path, "not a regular file")

    def test_unknown_dtype_is_left_to_the_reader(self):
        path = self.write({"a": entry(0, 5, (9,), "F4")}, 5)
        self.assertEqual(safetensors_file.read_header(path)["a"].dtype, "F4")


if __name__ == "__main__":
    environment.main()
