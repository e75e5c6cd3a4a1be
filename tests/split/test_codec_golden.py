"""split/codec/golden.py: the bits are held against SplitMix64 in plain Python integers."""

from __future__ import annotations

import hashlib
import re
import struct
from typing import Any

import numpy as np
import pytest

from split.codec.golden import SAMPLE_ELEMENTS, differs, golden_inputs, sample
from split.codec.payload import encode
from split.tensor import NUMPY_DTYPES, TensorSpec
from split.wire.limits import MAX_METADATA_BYTES

MASK = (1 << 64) - 1


def splitmix64(seed: int, count: int) -> list[int]:
    """As published, with Python's integers."""
    words = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        words.append(z ^ (z >> 31))
    return words


def test_the_reference_generator_gives_the_published_first_words() -> None:
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_floats_are_24_bit_fractions_of_the_published_generator() -> None:
    seed = int.from_bytes(hashlib.sha256(b"input").digest()[:8], "little")
    expected = [(word >> 40) / 2**23 - 1 for word in splitmix64(seed, 12)]
    found = golden_inputs([TensorSpec(name="input", dtype="FP32", shape=("n", 3, 2))], {"n": 2})["input"]
    assert found.shape == (2, 3, 2)
    assert found.tobytes() == struct.pack("<12f", *expected)
    assert found.min() >= -1
    assert found.max() < 1


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("shape", [(), (-1, 4), ("m", 3), (0, 2), (50, 40)])
def test_every_type_and_shape_has_golden_values(dtype: str, shape: tuple[int | str, ...]) -> None:
    spec = TensorSpec(name="x", dtype=dtype, shape=shape)
    found = golden_inputs([spec], {})["x"]
    assert found.dtype == NUMPY_DTYPES[dtype]
    assert spec.refuse(found) is None
    if found.size >= 1000 and dtype.startswith(("INT", "UINT", "BOOL")):
        assert set(np.unique(found).tolist()) == {0, 1}
        assert 0.4 < found.mean() < 0.6
    if dtype == "BYTES":
        assert set(found.reshape(-1).tolist()) <= {b"0", b"1"}


def test_each_name_has_its_own_stream() -> None:
    specs = [TensorSpec(name=name, dtype="FP32", shape=(8,)) for name in "ab"]
    both = golden_inputs(specs, {})
    assert both["a"].tolist() != both["b"].tolist()
    assert golden_inputs(specs[1:], {})["b"].tolist() == both["b"].tolist()


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 10_000, 1_000_000])
def test_a_sample_is_bounded_and_spread_over_the_whole_tensor(size: int) -> None:
    found = sample({"x": np.arange(size).reshape(-1, 1)})["x"]
    assert found.ndim == 1
    assert found.size <= SAMPLE_ELEMENTS
    assert found.size == size if size <= 4096 else found.size > SAMPLE_ELEMENTS // 2
    steps = np.diff(found)
    assert (steps == steps[:1]).all()
    if size:
        assert size - found[-1] <= max(1, 2 * size // SAMPLE_ELEMENTS)


@pytest.mark.parametrize("count", [56, 65, 300, 3000])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i1"])
def test_the_samples_of_many_outputs_fit_a_message_together(count: int, dtype: str) -> None:
    outputs = {f"output-with-a-name-{number}": np.arange(5000).astype(dtype) for number in range(count)}
    sampled = sample(outputs)
    assert sampled.keys() == outputs.keys()
    assert all(1 <= values.size <= SAMPLE_ELEMENTS for values in sampled.values())
    size = sum(memoryview(part).nbytes for part in encode(sampled, "raw"))
    assert size <= MAX_METADATA_BYTES - 4096
    if count == 300 and dtype == "f4":
        assert size > MAX_METADATA_BYTES // 2  # and the room is used


def test_the_same_outputs_do_not_differ_and_a_rounding_error_is_forgiven() -> None:
    wanted = {"a": np.array([1.0, -100.0], "f4"), "i": np.array([3])}
    assert differs({"a": np.array([1.0005, -100.0], "f4"), "i": np.array([3])}, wanted) is None


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({"a": np.array([1.0, -100.1], "f4"), "i": np.array([3])}, "'a' has a relative difference of 0.001"),
        ({"a": np.array([np.nan, -100.0], "f4"), "i": np.array([3])}, "'a' has a relative difference of inf"),
        ({"a": np.array([1.0, -100.0], "f4"), "i": np.array([4])}, "'i' has a relative difference of inf"),
        ({"a": np.array([1.0, -100.0, 0.0], "f4"), "i": np.array([3])}, r"'a' is float32 \[3\]"),
        ({"a": np.array([1.0, -100.0]), "i": np.array([3])}, "'a' is float64"),
        ({"a": np.array([1.0, -100.0], "f4")}, r"expected golden tensors \['a', 'i'\]"),
    ],
)
def test_outputs_of_another_computation_are_named(found: dict[str, np.ndarray[Any, Any]], sentence: str) -> None:
    wanted = {"a": np.array([1.0, -100.0], "f4"), "i": np.array([3])}
    assert re.search(sentence, differs(found, wanted) or "")
