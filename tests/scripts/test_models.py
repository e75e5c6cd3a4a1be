"""The converter and the fetcher of pinned models: nothing gets in that was not pinned."""

from __future__ import annotations

import collections
import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts import efficientnet_lite0, models


class _Evil:
    def __reduce__(self) -> Any:
        return (print, ("run by the checkpoint",))


def test_a_checkpoint_that_asks_for_code_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "evil.pth"
    checkpoint.write_bytes(pickle.dumps(efficientnet_lite0.LEGACY_MAGIC) + pickle.dumps(_Evil()))
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.print"):
        efficientnet_lite0.read_checkpoint(checkpoint)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "other.pth"
    checkpoint.write_bytes(b"".join(pickle.dumps(part) for part in (1, 2, 3, collections.OrderedDict(), [])))
    with pytest.raises(pickle.UnpicklingError, match="legacy format"):
        efficientnet_lite0.read_checkpoint(checkpoint)


def test_a_member_with_another_digest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as whole:
        whole.writestr("skimage/data/chelsea.png", b"not the cat")
    entry = models.MANIFEST["files"]["chelsea.png"]
    folder = tmp_path / "archives" / f"{entry['package']}-{entry['version']}"
    folder.mkdir(parents=True)
    (folder / "package.whl").write_bytes(archive.getvalue())
    monkeypatch.setattr(models, "CACHE", tmp_path)
    with pytest.raises(models.Unavailable, match=r"chelsea\.png of scikit-image .* is not what was pinned"):
        models.photo_path("chelsea.png")
    assert not list((tmp_path / "files").rglob("*.png"))


def test_a_name_that_is_not_pinned_is_refused_by_name() -> None:
    with pytest.raises(models.Unavailable, match=r"'resnet' is not in scripts/models\.json"):
        models.model_path("resnet")


def test_the_real_network_knows_a_cat_when_it_sees_one(
    real_model: Callable[[str], Path], photo: Callable[[str], Path]
) -> None:
    import onnxruntime
    from PIL import Image

    session = onnxruntime.InferenceSession(real_model("efficientnet-lite0"), providers=["CPUExecutionProvider"])
    image = Image.open(photo("chelsea.png")).convert("RGB").crop((75, 0, 375, 300)).resize((224, 224))
    pixels = (np.asarray(image, np.float32) - 127) / 128
    (logits,) = session.run(None, {"input": pixels.transpose(2, 0, 1)[None]})
    assert models.imagenet_labels()[int(logits.argmax())] in ("tabby, tabby cat", "tiger cat", "Egyptian cat")


def test_no_photograph_is_both_calibrated_from_and_measured_on() -> None:
    sets = models.MANIFEST["photographs"]
    digests = {kind: {models.MANIFEST["files"][name]["sha256"] for name in names} for kind, names in sets.items()}
    assert len(digests["test"]) >= 30
    assert len(digests["calibration"]) >= 20
    assert not digests["test"] & digests["calibration"]
    for kind in sets:
        small = [name for name in sets[kind] if models.MANIFEST["files"][name]["package"] == "foolbox"]
        assert len(small) >= 8
