"""profiles/models/*.yaml: a contract for each model of the zoo, true to what the manifest and the model itself say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scripts import models
from split.oip.options import CODECS
from split.profiles.contract import check_contract, load_contract
from split.runtime.segment import OrtEngine
from split.tensor import dtype_name

PATHS = {path.stem: path for path in models.CONTRACTS.glob("*.yaml")}


def feed(name: str) -> dict[str, dict[str, Any]]:
    """Inputs that the manifest has been tried with: name → dtype, shape."""
    return {tensor["name"]: tensor for tensor in models.MANIFEST["models"][name]["feed"]}


def test_each_model_of_the_zoo_has_a_contract_and_each_contract_a_model() -> None:
    assert set(models.MANIFEST["zoo"]) == set(PATHS)


@pytest.mark.parametrize("name", PATHS)
def test_a_contract_takes_the_inputs_of_the_manifest(name: str) -> None:
    contract = load_contract(PATHS[name])
    assert contract.model == name
    assert {tensor.name for tensor in contract.data.inputs} == set(feed(name))
    for tensor in contract.data.inputs:
        told = feed(name)[tensor.name]
        assert tensor.dtype == dtype_name(np.dtype(told["dtype"]))
        assert tensor.shape is not None
        assert len(tensor.shape) == len(told["shape"])
        assert all(want in (-1, size) for want, size in zip(tensor.shape, told["shape"], strict=True)), tensor.name


@pytest.mark.parametrize("name", PATHS)
def test_a_contract_that_allows_a_loss_bounds_it(name: str) -> None:
    data = load_contract(PATHS[name]).data
    lossy = set(data.codecs) & {"fp16", "int8"}
    assert set(data.codecs) <= set(CODECS)
    assert bool(lossy) is (data.fidelity.bound > 0)


@pytest.mark.parametrize("name", PATHS)
def test_a_contract_fits_the_model_itself(name: str) -> None:
    path = models.cached_model(name)
    if path is None:
        pytest.skip(f"{name} is not in the cache; scripts/models {name} fetches it")
    session = OrtEngine().open(path, threads=1)
    contract = load_contract(PATHS[name])
    signature = SimpleNamespace(inputs=session.input_specs, outputs=session.output_specs)
    check_contract(contract, signature, path=Path(f"{name}.yaml"))
    assert [tensor.name for tensor in contract.data.inputs] == list(session.inputs)
    assert [tensor.name for tensor in contract.data.outputs] == list(session.outputs)
