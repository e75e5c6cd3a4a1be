"""The messages of wire protocol v1 as frozen structs; `frames.py` makes their bytes. No numpy, no sockets, no clock.

A message is metadata (MessagePack of one of these structs, tagged by `t`) and, for `Infer`, `Reply` and `ModelChunk`,
a payload of opaque bytes. Unknown metadata fields are ignored (a later v1.x may add some); unknown tags are refused.
PROTOCOL.md is the specification; this module follows it.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 3
"""What each added stands in PROTOCOL.md §9."""

CREDIT_SINCE_MINOR = 1
"""A peer of this minor version or a later one keeps to the credit that our Hello gives it."""
RENEW_SINCE_MINOR = 1
"""One that knows `Renew`."""
PACE_SINCE_MINOR = 2
"""One that knows `Pace`."""
PONG_BYTES_SINCE_MINOR = 3
"""A companion that answers `pong_bytes` of a ping; an older one sends a bare pong."""

NO_CALIBRATION = "NO_CALIBRATION"
"""Code of a refused Infer of codec `klt`: the companion has not the calibration that its payload names."""

LANES = ("", "urgent", "bulk")
"""Of a Hello: the only connection of its session, the first of two, the second."""


class Priority(IntEnum):
    """Lower goes first; within one priority, first come first served, but for pieces of models (`outbox.py`)."""

    CONTROL = 0
    URGENT = 1
    NORMAL = 2
    BULK = 3


class _Meta(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", omit_defaults=True):
    pass


class Hello(_Meta, tag="hello", frozen=True, kw_only=True):
    """First message of each side, both ways at once."""

    major: int
    minor: int
    agent: str
    """`isthmus 0.1.0`, for logs."""
    runtime: str
    """`onnxruntime 1.32.0 x86_64`, for logs and status."""
    max_message_bytes: int
    """The largest message this side accepts, payload included."""
    codecs: tuple[str, ...]
    models: tuple[str, ...] = ()
    """Digests this side holds ready (companion only)."""
    image: str = ""
    """Digest of a built-in test picture decoded here; where both differ, encoded inputs do not travel."""
    kernels: dict[str, int] = {}
    """Operator → what its integer kernel answers to a built-in question (companion only); where the device's answers
    are others, no model that computes in integers is shared."""
    session: str = ""
    """32 hex digits, chosen at random by the device for each session of two connections (device only)."""
    lane: str = ""
    """One of LANES; empty together with `session`."""
    window_bytes: int = 0
    """Credit of the peer at the beginning (`credit.py`); 0: none is given and none needed, TCP alone holds it back."""


class ModelOffer(_Meta, tag="model-offer", frozen=True, kw_only=True):
    """Device → companion: this model will be used. Answered by `ModelNeed` (empty: all is held), then `ModelReady`."""

    digest: str
    files: tuple[tuple[str, int, str], ...]
    """(name, bytes, sha256 hex), the model file first."""
    dims: dict[str, int] = {}
    """Symbolic dims of the golden inputs."""
    golden: bytes = b""
    """Golden inputs in codec payload format; empty: the built-in ones (same seed on both sides)."""
    chunks: bytes = b""
    """The files, one after the other, as pieces that other models may have too: for each 4 bytes of size
    (little-endian) and 32 of SHA-256. Sent once the companion has said that it does not hold the model."""
    calibrates: str = ""
    """Digest of the model whose calibration this is: one file, for reading payloads of codec `klt`, and no model.
    Answered as an offer is, the `ModelReady` without times. Only to a companion whose Hello names that codec."""
    keeps: tuple[str, ...] = ()
    """Of a calibration: digests of others of that model that the device goes on using, where it serves the model under
    several names. Of all that are not among them, only the one used before this stays, for what is on its way."""


class ModelNeed(_Meta, tag="model-need", frozen=True, kw_only=True):
    digest: str
    missing: tuple[tuple[str, int], ...]
    """(file, offset): send from there on; empty when all is held."""
    lengths: tuple[int, ...] = ()
    """Bytes to send from each of these offsets; empty: to the end of the file."""


class ModelChunk(_Meta, tag="model-chunk", frozen=True, kw_only=True):
    """Payload: bytes of `file` from `offset`."""

    digest: str
    file: str
    offset: int
    last: bool = False


class ModelReady(_Meta, tag="model-ready", frozen=True, kw_only=True):
    """Companion → device: the whole runs here; `golden` in codec payload format is for the comparison (I10)."""

    digest: str
    golden: bytes
    """Sampled golden outputs of the whole on the companion; what is sampled: `split.codec.golden.sample`."""
    whole_ms: float
    image_ms: float = 0.0


class SegmentOpen(_Meta, tag="segment-open", frozen=True, kw_only=True):
    """Device → companion: this cut's tail will be used. Answered by `SegmentReady` or `Refused`."""

    digest: str
    cut: str
    node_bitmap: str
    """As in the model card; the companion checks that its hash is `cut`."""


class SegmentReady(_Meta, tag="segment-ready", frozen=True, kw_only=True):
    digest: str
    cut: str
    golden: bytes
    """Sampled golden boundary and outputs of head ∘ tail on the companion."""
    tail_ms: float


class Infer(_Meta, tag="infer", frozen=True, kw_only=True):
    """Device → companion; payload: the boundary (or the inputs) in the codec's format."""

    request_id: str
    attempt: int
    digest: str
    cut: str
    """Cut id, or `offload`."""
    codec: str
    budget_ms: float
    """What is left of the deadline when this was sent; a duration, since clocks are never compared."""
    outputs: tuple[str, ...] = ()
    """Outputs wanted; empty: all that the tail makes."""
    encoded: dict[str, dict[str, object]] = {}
    """Input name → how to decode it (contract's `encoded`), for codec `encoded`."""
    output_codec: str = "raw"


class Reply(_Meta, tag="reply", frozen=True, kw_only=True):
    """Companion → device; payload: the outputs in `output_codec`'s format."""

    request_id: str
    attempt: int
    cut: str
    codec: str
    queue_ms: float
    decode_ms: float
    tail_ms: float
    encode_ms: float
    cloud_ms: float
    """From the Infer's last byte received to the Reply handed to the connection: all of the companion's time."""


class Refused(_Meta, tag="refused", frozen=True, kw_only=True):
    """An error about one request, model or segment, and the connection lives on; or, naming none of them, about the
    connection, and the last that its sender says."""

    code: str
    message: str
    request_id: str = ""
    attempt: int = 0
    digest: str = ""
    cut: str = ""


class Renew(_Meta, tag="renew", frozen=True, kw_only=True):
    """Device → companion: a new certificate for the name that this connection is authenticated with, please.

    Answered by one `Renewed`."""

    request: str
    """PKCS#10 request, PEM: only its public key counts, and that it signed the request."""


class Renewed(_Meta, tag="renewed", frozen=True, kw_only=True):
    """Companion → device: the certificate, or why there is none; the connection lives on."""

    chain: str = ""
    """PEM, the device's certificate first; empty: refused."""
    message: str = ""
    """Why not, a sentence."""


class Cancel(_Meta, tag="cancel", frozen=True, kw_only=True):
    """Device → companion: nobody waits for this request any more. Never answered."""

    request_id: str
    attempt: int


class Ping(_Meta, tag="ping", frozen=True, kw_only=True):
    nonce: int
    padding: bytes = b""
    """A probe may carry weight, to measure the rate."""
    pong_bytes: int = 0
    """Padding wanted in the pong, to measure the rate down (device only, `MAX_PONG_BYTES` at most). Only to a companion
    of `PONG_BYTES_SINCE_MINOR`."""


class Pong(_Meta, tag="pong", frozen=True, kw_only=True):
    nonce: int
    padding: bytes = b""
    """As much as the ping asked for."""


class Pace(_Meta, tag="pace", frozen=True, kw_only=True):
    """Companion → device: it computes faster or slower than it said before on this connection. Never answered."""

    work_ms: float
    """What a piece of work takes it now that is always the same; which one is its own affair."""
    since_ms: float = 0.0
    """So long ago it was still as it had said before."""


class Goodbye(_Meta, tag="goodbye", frozen=True, kw_only=True):
    """This side will close when its replies are out; send nothing new here."""

    reason: str


Message = (
    Hello
    | ModelOffer
    | ModelNeed
    | ModelChunk
    | ModelReady
    | SegmentOpen
    | SegmentReady
    | Infer
    | Reply
    | Refused
    | Renew
    | Renewed
    | Cancel
    | Ping
    | Pong
    | Pace
    | Goodbye
)
PAYLOAD_MESSAGES = (Infer, Reply, ModelChunk)
