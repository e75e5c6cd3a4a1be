"""split/runtime/accelerators.py: what of a contract's accelerators a host has, by the providers that work there."""

from __future__ import annotations

from collections.abc import Sequence

import onnxruntime
import pytest

from split.errors import InvalidModel
from split.profiles.contract import ACCELERATOR
from split.runtime.accelerators import PROVIDERS, Choice, choose

CPU = "CPUExecutionProvider"
JETSON = ("TensorrtExecutionProvider", "CUDAExecutionProvider", CPU)


def never() -> Sequence[str]:
    raise AssertionError("the runtime need not be asked")


@pytest.mark.parametrize(
    ("wanted", "usable", "runs_on", "providers", "note"),
    [
        (("cuda", "cpu"), JETSON, ("cuda", "cpu"), ("CUDAExecutionProvider", CPU), ""),
        (("tensorrt", "cuda"), JETSON, ("tensorrt", "cuda"), JETSON[:2], ""),
        (("cuda", "tensorrt"), JETSON, ("cuda", "tensorrt"), (JETSON[1], JETSON[0]), ""),
        (("cuda", "cpu", "tensorrt"), JETSON, ("cuda", "cpu"), (JETSON[1], CPU), ""),
        (("openvino", "cuda"), JETSON, ("cuda",), JETSON[1:2], "runs on cuda: this host has no openvino"),
        (("tensorrt", "cuda", "cpu"), (CPU,), ("cpu",), (CPU,), "runs on cpu: this host has no tensorrt, cuda"),
        (("quantum", "cpu"), JETSON, ("cpu",), (CPU,), "runs on cpu: this host has no quantum"),
        (("cuda", "quantum"), JETSON, ("cuda",), JETSON[1:2], ""),
    ],
)
def test_the_first_choices_that_the_host_has_are_taken_and_a_better_one_that_is_missing_is_said(
    wanted: tuple[str, ...], usable: tuple[str, ...], runs_on: tuple[str, ...], providers: tuple[str, ...], note: str
) -> None:
    choice = choose(wanted, lambda: usable)
    assert choice == Choice(runs_on, note)
    assert choice.providers == providers
    assert choice.accelerated is (providers != (CPU,))


def test_where_the_processor_comes_first_nothing_else_is_asked_for() -> None:
    assert choose(("cpu",), never).providers == (CPU,)
    assert choose(("cpu", "cuda"), never).providers == (CPU,)


def test_a_host_that_has_none_of_them_refuses_and_says_what_it_has() -> None:
    with pytest.raises(InvalidModel, match=r"cuda, rknpu, which this host does not have \(it has cpu, openvino\)"):
        choose(("cuda", "rknpu"), lambda: ("OpenVINOExecutionProvider", CPU))


def test_the_runtime_of_this_host_is_asked_where_nobody_else_is() -> None:
    assert choose(("cann", "cpu")).note == "runs on cpu: this host has no cann"


def test_every_word_can_stand_in_a_contract_and_every_provider_is_one_of_the_runtime() -> None:
    assert all(ACCELERATOR.fullmatch(word) for word in PROVIDERS)
    # two that this build does not list: a plugin, and one of builds up to 1.22
    elsewhere = {"NvTensorRTRTXExecutionProvider", "ROCMExecutionProvider"}
    assert set(PROVIDERS.values()) <= {*onnxruntime.get_all_providers(), *elsewhere}
