"""What a caller may ask of Isthmus through request parameters: mode, cut, codec, deadline, privacy, priority. Pure."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from split.errors import InvalidRequest
from split.ids import KLT, CutId
from split.oip.infer import OipRequest, Scalar
from split.oip.tensors import shown
from split.profiles.contract import PRIVACY_ORDER, Privacy

Word = TypeVar("Word", bound=str)

MODES: Final = ("auto", "local", "split", "offload")
CODECS: Final = ("raw", "fp16", "int8", "klt", "encoded", "jpeg", "webp")
PICTURES: Final = ("encoded", "jpeg", "webp")
"""Of them, those that carry a picture, which only a whole input is."""

MAX_DEADLINE_MS: Final = 3_600_000
"""One hour: a longer wait is a mistake in the unit."""
MAX_PRIORITY: Final = (1 << 32) - 1

_KNOWN: Final = frozenset(
    ("isthmus.mode", "isthmus.cut", "isthmus.codec", "isthmus.fidelity", "isthmus.deadline_ms", "isthmus.privacy")
)
_CUT: Final = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    mode: str = "auto"
    """One of `MODES`."""
    cut: CutId | None = None
    """Only with mode auto or split."""
    codec: str | None = None
    """One of `CODECS`; not with mode local."""
    fidelity: float | None = None
    """A bound closer than the contract's, by its measure; None: the contract's. Which is looser, intake knows."""
    deadline_ms: float | None = None
    """The smaller of `isthmus.deadline_ms` and `timeout` (µs); None when the caller gave neither."""
    privacy: Privacy = "any"
    priority: int = 0
    """As Triton has it: 1 is the highest, 0 the model's default."""


_NO_WISHES: Final = RequestOptions()


def isthmus_options(request: OipRequest) -> RequestOptions:
    """The request's options, checked; InvalidRequest naming the parameter and its allowed values.

    A parameter `isthmus.*` that is not known is refused: a misspelt wish must not pass for a fulfilled one.
    """
    parameters = request.parameters
    if not parameters:
        return _NO_WISHES
    for key in parameters:
        if key[:8].lower() == "isthmus." and key not in _KNOWN:
            raise InvalidRequest(f"parameter {shown(key)} is not known; known are {', '.join(sorted(_KNOWN))}")
    mode = _choice(parameters.get("isthmus.mode"), "isthmus.mode", MODES) or "auto"
    codec = _choice(parameters.get("isthmus.codec"), "isthmus.codec", CODECS)
    cut = parameters.get("isthmus.cut")
    if cut is not None and not (isinstance(cut, str) and _CUT.fullmatch(cut)):
        raise InvalidRequest(
            f"parameter isthmus.cut must be a cut's id (12 hex digits, see `isthmus cuts`), got {shown(cut)}"
        )
    if cut is not None and mode in ("local", "offload"):
        raise InvalidRequest(f"parameter isthmus.cut does not go with isthmus.mode {mode}; use split or auto")
    if codec is not None and mode == "local":
        raise InvalidRequest("parameter isthmus.codec does not go with isthmus.mode local: nothing travels")
    if codec in PICTURES and (mode == "split" or cut is not None):
        raise InvalidRequest(f"isthmus.codec {codec} carries a picture input; use isthmus.mode offload or auto")
    if codec == KLT and mode == "offload":
        raise InvalidRequest("isthmus.codec klt carries what crosses at a cut; use isthmus.mode split or auto")
    return RequestOptions(
        mode=mode,
        cut=None if cut is None else CutId(cut),
        codec=codec,
        fidelity=_fidelity(parameters.get("isthmus.fidelity")),
        deadline_ms=_deadline_ms(parameters.get("isthmus.deadline_ms"), parameters.get("timeout")),
        privacy=_choice(parameters.get("isthmus.privacy"), "isthmus.privacy", PRIVACY_ORDER) or "any",
        priority=_whole(parameters.get("priority"), "priority", MAX_PRIORITY),
    )


def _choice(value: object, key: str, allowed: Sequence[Word]) -> Word | None:
    if value is None:
        return None
    for word in allowed:
        if value == word:
            return word
    raise InvalidRequest(f"parameter {key} must be one of {', '.join(allowed)}, got {shown(value)}")


def _whole(value: object, key: str, most: int) -> int:
    if value is None:
        return 0
    if type(value) is int and 0 <= value <= most:
        return value
    raise InvalidRequest(f"parameter {key} must be a whole number from 0 to {most}, got {shown(value)}")


def _fidelity(value: Scalar | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool | str) or not 0 <= value <= sys.float_info.max:
        raise InvalidRequest(f"parameter isthmus.fidelity must be a finite number, 0 or more, got {shown(value)}")
    return float(value)


def _deadline_ms(deadline_ms: Scalar | None, timeout_us: Scalar | None) -> float | None:
    found: list[float] = []
    if deadline_ms is not None:
        if isinstance(deadline_ms, bool | str) or not 0 < deadline_ms <= MAX_DEADLINE_MS:
            raise InvalidRequest(
                f"parameter isthmus.deadline_ms must be a number above 0, at most {MAX_DEADLINE_MS}, "
                f"got {shown(deadline_ms)}"
            )
        found.append(float(deadline_ms))
    timeout = _whole(timeout_us, "timeout", MAX_DEADLINE_MS * 1000)
    if timeout:  # Triton: 0 is no timeout
        found.append(timeout / 1000)
    return min(found, default=None)
