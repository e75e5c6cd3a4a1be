"""Transforms and scales against what is known of them by hand, and rates against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from split.codec.calibration import INVERSE_TOLERANCE, LAYOUTS, CutTables, TensorTables
from split.codec.klt import BoundaryTables, decode_klt, encode_klt
from split.tensor import TensorSpec
from split.workbench.klt_tables import Scales, Statistics, gaussian_bytes, klt_of, plain_sensitivity, transform_of
from split.workbench.planes import block_of, coefficients, layouts_of, planes, unplaned


def test_two_alike_channels_become_their_sum_and_their_difference() -> None:
    transform, inverse = transform_of(np.array([[2.0, 1.0], [1.0, 2.0]]), np.eye(2))
    half = math.sqrt(0.5)
    np.testing.assert_allclose(np.abs(transform), [[half, half], [half, half]], atol=1e-12)
    assert transform[0, 0] * transform[0, 1] > 0 > transform[1, 0] * transform[1, 1]
    np.testing.assert_allclose(transform @ inverse, np.eye(2), atol=1e-12)


def test_channels_are_scaled_by_the_root_of_what_they_matter() -> None:
    transform, inverse = transform_of(np.eye(2), np.diag([1.0, 4.0]))
    np.testing.assert_allclose(transform, [[0, 2], [1, 0]], atol=1e-12)  # what matters most first
    np.testing.assert_allclose(inverse, [[0, 1], [0.5, 0]], atol=1e-12)


def test_coefficients_are_uncorrelated_and_their_noise_does_the_same_harm_in_each() -> None:
    random = np.random.default_rng(1)
    a = random.normal(0, 1, (6, 6))
    sigma, m = a @ a.T, np.diag(random.uniform(0.1, 10, 6))
    transform, inverse = transform_of(sigma, m)
    spread = transform @ sigma @ transform.T
    np.testing.assert_allclose(spread, np.diag(np.diag(spread)), atol=1e-9)
    assert list(np.diag(spread)) == sorted(np.diag(spread), reverse=True)
    np.testing.assert_allclose(inverse.T @ m @ inverse, np.eye(6), atol=1e-9)  # harm of unit noise, by M


def test_channels_that_the_tail_does_not_look_at_are_left_out() -> None:
    transform, inverse = transform_of(np.diag([1.0, 3.0]), np.diag([1.0, 0.0]))
    np.testing.assert_allclose(np.abs(transform), [[1, 0]])
    np.testing.assert_allclose(np.abs(inverse), [[1], [0]])


def test_channels_that_never_changed_are_components_of_their_own_as_fine_as_the_finest() -> None:
    transform, inverse = transform_of(np.diag([1.0, 0.0, 3.0]), np.diag([1.0, 0.0, 9.0]))
    np.testing.assert_allclose(transform, [[0, 0, 3], [1, 0, 0], [0, 3, 0]], atol=1e-12)
    np.testing.assert_allclose(inverse, [[0, 1, 0], [0, 0, 1 / 3], [1 / 3, 0, 0]], atol=1e-12)
    for sigma in (np.zeros((3, 3)), np.eye(3)):  # nothing changed; nothing is looked at
        transform, inverse = transform_of(sigma, np.zeros((3, 3)))
        np.testing.assert_allclose(transform @ inverse, np.eye(3), atol=1e-12)


def test_channels_that_hardly_matter_are_kept_at_a_small_weight() -> None:
    transform, _ = transform_of(np.eye(2), np.diag([1.0, 1e-15]))
    assert transform.shape == (2, 2)
    # By 1e-9 of the weight, of which the diagonal's shrinking makes 0.3.
    np.testing.assert_allclose(np.abs(transform[1]), [0, math.sqrt(0.3e-9)], rtol=1e-3, atol=1e-12)


def test_a_direction_that_exact_sensitivity_does_not_look_at_has_a_tenth_of_a_channels_precision() -> None:
    """0.7 M + 0.3 of the unit matrix has 1.7 along [1, 1]; along [1, -1] 0.3, or 0.01 where that is known to be 0."""
    for exact, unseen in ((True, 0.01), (False, 0.3)):
        transform, inverse = transform_of(np.eye(2), np.ones((2, 2)), exact=exact)
        np.testing.assert_allclose(np.abs(transform[0]), math.sqrt(1.7 / 2), rtol=1e-9)
        np.testing.assert_allclose(np.abs(transform[1]), math.sqrt(unseen / 2), rtol=1e-6)
        assert transform[0] @ transform[1] == pytest.approx(0)
        np.testing.assert_allclose(transform @ inverse, np.eye(2), atol=1e-9)


def test_tables_of_weights_that_look_at_few_directions_can_be_read_again() -> None:
    random = np.random.default_rng(9)
    a, weights = random.normal(0, 1, (2, 200, 200)) * np.exp(random.normal(0, 2, 200))
    statistics = Statistics(layout="NCHW")
    statistics.add((a @ random.normal(0, 1, (200, 2000))).reshape(1, 200, 40, 50).astype(np.float32))
    klt = klt_of(statistics, weights[:9].T @ weights[:9], exact=True)
    unit = klt.transform.astype(np.float64) @ klt.inverse.astype(np.float64)
    assert np.abs(unit - np.eye(200)).max() < INVERSE_TOLERANCE / 2


@pytest.mark.parametrize("constant", [0.0, 0.3, -1000.1])
@pytest.mark.parametrize("live", [2.0, 1e6])
def test_a_channel_silent_in_calibration_that_speaks_up_is_not_read_as_silence(constant: float, live: float) -> None:
    random = np.random.default_rng(8)
    arrays = [random.normal(0, 1, (1, 8, 14, 14)).astype(np.float32) for _ in range(10)]
    statistics = Statistics(layout="NCHW")
    for array in arrays:
        array[:, 3] = constant
        statistics.add(array)
    scales = Scales(klt_of(statistics, np.diag(1.0 * (np.arange(8) != 3))))
    for array in arrays:
        scales.add(array)
    spec = TensorSpec(name="x", dtype="FP32", shape=(1, 8, 14, 14))
    tensors = (TensorTables(spec=spec, klt=scales.klt()),)
    tables = BoundaryTables(CutTables(tensors=tensors, node_bitmap=""), "0" * 64)
    asked = arrays[0].copy()
    asked[:, 3, 4:9] = live
    silent, spoken = (b"".join(encode_klt({"x": x}, tables, 100)) for x in (arrays[0], asked))
    back = decode_klt(spoken, tables, max_bytes=1 << 20)["x"]
    np.testing.assert_allclose(back, asked, atol=0.5)  # the step is 0.09
    assert len(spoken) > len(silent)


def test_statistics_are_those_of_all_positions_of_all_inputs() -> None:
    random = np.random.default_rng(2)
    arrays = [random.normal(3, 2, (1, 5, 6, 4)).astype(np.float32) for _ in range(400)]
    statistics = Statistics(layout="NHWC")
    for array in arrays:
        statistics.add(array)
    rows = np.concatenate([array.reshape(-1, 4) for array in arrays]).astype(np.float64)
    np.testing.assert_allclose(statistics.mean, rows.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(statistics.covariance(), np.cov(rows.T, bias=True), atol=2e-3)  # shrunk by 4 in 12,000
    np.testing.assert_allclose(statistics.deviation, rows.std(axis=0), rtol=1e-6)
    assert statistics.finite
    statistics.add(np.full((1, 5, 6, 4), np.inf, np.float32))
    assert not statistics.finite


def test_scales_are_the_mean_magnitudes_of_a_laplace_source() -> None:
    random = np.random.default_rng(3)
    arrays = [random.laplace(0, [[[[0.5]], [[8.0]]]], (1, 2, 4, 4)).astype(np.float32) for _ in range(800)]
    statistics = Statistics(layout="NCHW")
    for array in arrays:
        statistics.add(array)
    klt = klt_of(statistics, np.eye(2))
    assert (klt.block, klt.scales.shape) == ((4, 4), (2, 4, 4))
    scales = Scales(klt)
    for array in arrays:
        scales.add(array)
    found = 2.0 ** ((scales.klt().scales.astype(float) - 128) / 8)
    # A sum of 16 independent Laplace values is nearly Gaussian: mean |y| = σ √(2/π), σ² = 2b².
    np.testing.assert_allclose(found[0], 8 * math.sqrt(2) * math.sqrt(2 / math.pi), rtol=0.15)
    np.testing.assert_allclose(found[1], 0.5 * math.sqrt(2) * math.sqrt(2 / math.pi), rtol=0.15)


def test_what_stands_for_sensitivity_counts_all_errors_alike() -> None:
    np.testing.assert_allclose(plain_sensitivity(np.diag([1.0, 3.0])), np.eye(2) / 2)
    np.testing.assert_allclose(plain_sensitivity(np.zeros((2, 2))), np.eye(2))


@pytest.mark.parametrize(
    ("variances", "share", "bits"),
    [
        ([4.0, 1.0], 0.4, 1.0),  # noise 1 in each: half a log of 4, of 1
        ([4.0, 1.0], 0.7, 0.5 * math.log2(4 / 2.5)),  # the second is all noise
        ([4.0, 0.0], 0.25, 1.0),
        ([5.0], 1.0, 0.0),
        ([0.0], 0.1, 0.0),
        ([16.0, 16.0, 16.0, 16.0], 1 / 16, 8.0),
    ],
)
def test_gaussian_bytes_are_reverse_water_filling(variances: list[float], share: float, bits: float) -> None:
    assert gaussian_bytes(np.array(variances), share) == pytest.approx(bits / 8, abs=1e-12)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_planes_and_back_are_the_same_tensor(layout: str) -> None:
    shape = {"NCHW": (2, 3, 4, 5), "NHWC": (2, 4, 5, 3), "NCT": (2, 3, 5), "NTC": (2, 5, 3), "NC": (2, 3)}[layout]
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    x = planes(array, layout)
    assert (x.shape[0], x.shape[1], x.dtype) == (2, 3, np.float64)
    back = unplaned(x, layout, array)
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back, array)


def test_coefficients_are_those_of_each_blocks_cosines() -> None:
    y = np.zeros((1, 1, 4, 4))
    y[0, 0, :2, 2:] = 1  # the second block of the first row
    found = coefficients(y, (2, 2))
    assert found.shape == (1, 2, 2, 4)
    np.testing.assert_allclose(found[0, :, :, 1], [[2, 0], [0, 0]], atol=1e-6)
    np.testing.assert_allclose(found[0, :, :, [0, 2, 3]], 0, atol=1e-6)
    assert coefficients(np.ones((1, 1, 3, 3)), (2, 2))[0, 0, 0].tolist() == pytest.approx([2, 2, 2, 2])  # continued


@pytest.mark.parametrize(
    ("rows", "columns", "block"),
    [
        (14, 14, (7, 7)),
        (28, 28, (7, 7)),
        (56, 56, (8, 8)),
        (20, 20, (5, 5)),
        (13, 40, (8, 8)),
        (1, 96, (1, 8)),
        (3, 3, (3, 3)),
        (22, 22, (8, 8)),
    ],
)
def test_blocks_fill_the_plane_where_they_can(rows: int, columns: int, block: tuple[int, int]) -> None:
    assert block_of(rows, columns) == block


def test_blocks_of_tensors_of_changing_length_do_not_depend_on_the_last_one() -> None:
    def block(*lengths: int) -> tuple[int, int]:
        statistics = Statistics(layout="NCT")
        for length in lengths:
            statistics.add(np.random.default_rng(length).normal(0, 1, (1, 3, length)).astype(np.float32))
        return klt_of(statistics, np.eye(3)).block

    assert block(96, 96) == (1, 8)
    assert block(77, 77) == (1, 7)
    assert block(96, 80, 5) == block(5, 96, 77) == (1, 8)
    assert block(3, 5) == (1, 5)


@pytest.mark.parametrize(
    ("dims", "shape", "layouts"),
    [
        (("n", 80, 14, 14), (1, 80, 14, 14), ["NCHW"]),
        (("n", 14, 14, 80), (1, 14, 14, 80), ["NHWC"]),
        (("n", 40, "h", "w"), (1, 40, 30, 20), ["NCHW"]),
        (("n", 12, 30, 20), (1, 12, 30, 20), ["NCHW", "NHWC"]),
        (("n", "t", 384), (1, 27, 384), ["NTC"]),
        ((1, 197, 192), (1, 197, 192), ["NCT", "NTC"]),
        (("n", 1280), (1, 1280), []),  # too many
        (("n", 96), (1, 96), ["NC"]),
        ((5,), (5,), []),
        (("n", 80, 14, 0), (1, 80, 14, 0), []),
    ],
)
def test_layouts_are_told_by_fixed_channels_and_squares(
    dims: tuple[int | str, ...], shape: tuple[int, ...], layouts: list[str]
) -> None:
    assert layouts_of(TensorSpec(name="x", dtype="FP32", shape=dims), shape) == layouts
    assert layouts_of(TensorSpec(name="x", dtype="INT64", shape=dims), shape) == []
