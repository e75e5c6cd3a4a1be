"""Every error that leaves a module of Isthmus, in one tree; texts are sentences for the one who reads them at three.

IsthmusError
├── ConfigError            the configuration is wrong: programs exit 78
├── InvalidRequest         the caller's request is wrong: HTTP 400
│   ├── TooLarge           over a byte limit: HTTP 413
│   └── UnsupportedRequest understood, not offered: HTTP 501
├── UnknownModel           no such model or version: HTTP 404
├── ModelUnavailable       known, cannot answer now: HTTP 503
├── Overloaded             no room now, try again: HTTP 503
├── DeadlineExceeded       no right answer by the deadline: HTTP 504
├── InvalidModel           the file is no model that can be served (says why)
├── CutRefused             this cut may not be made (says why)
├── EngineFailed           the runtime failed on a valid request: HTTP 500
├── CodecError             bytes that are no boundary, or a tensor this codec does not carry
├── InvalidCalibration     the codec's sidecar is damaged or of another model: calibrate again
├── IdentityError          a certificate or key is missing, wrong or refused
│   ├── Revoked            the certificate was taken back: only enrolling anew helps
│   └── TokenRefused       a join token is wrong, used or expired: only a new one helps
└── ChannelError
    ├── ConnectionLost     the companion is gone; the request goes on locally
    │   └── NotReached     dialling failed; its code says how: TIMEOUT, REFUSED, TLS, UNREACHABLE
    ├── LocalProtocolError our side broke the protocol (a bug of ours)
    ├── RemoteProtocolError the peer broke the protocol: the connection is closed
    └── CompanionRefused   the companion answered with an error (its code is kept)

Who handles what: the edges (HTTP, CLI, wire) turn errors into statuses, exit codes and frames; between them nobody
catches what he cannot mend. A bug is an `assert` and not in this tree.
"""

from __future__ import annotations


class IsthmusError(Exception):
    """Base of all; `code` is stable and machine-readable, `status` is the HTTP status it maps to."""

    code = "INTERNAL"
    status = 500


class ConfigError(IsthmusError):
    code = "BAD_CONFIG"


class InvalidRequest(IsthmusError):
    code = "INVALID_REQUEST"
    status = 400


class TooLarge(InvalidRequest):
    code = "TOO_LARGE"
    status = 413


class UnsupportedRequest(InvalidRequest):
    code = "UNSUPPORTED"
    status = 501


class UnknownModel(IsthmusError):
    code = "UNKNOWN_MODEL"
    status = 404


class ModelUnavailable(IsthmusError):
    code = "MODEL_UNAVAILABLE"
    status = 503


class Overloaded(IsthmusError):
    code = "OVERLOADED"
    status = 503


class DeadlineExceeded(IsthmusError):
    code = "DEADLINE_EXCEEDED"
    status = 504


class InvalidModel(IsthmusError):
    code = "INVALID_MODEL"
    status = 400


class CutRefused(IsthmusError):
    code = "CUT_REFUSED"
    status = 400


class EngineFailed(IsthmusError):
    code = "ENGINE_FAILED"
    status = 500


class CodecError(IsthmusError):
    code = "CODEC_ERROR"
    status = 400


class InvalidCalibration(IsthmusError):
    code = "INVALID_CALIBRATION"


class IdentityError(IsthmusError):
    code = "IDENTITY_ERROR"


class Revoked(IdentityError):
    code = "REVOKED"


class TokenRefused(IdentityError):
    """`code` says which way: TOKEN_UNKNOWN, TOKEN_USED or TOKEN_EXPIRED."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ChannelError(IsthmusError):
    code = "CHANNEL_ERROR"
    status = 503


class ConnectionLost(ChannelError):
    code = "CONNECTION_LOST"


class NotReached(ConnectionLost):
    """There never was a connection. `code`: TIMEOUT (nothing came back in time), REFUSED (nothing listens there), TLS
    (what listens there speaks no TLS 1.3 as Isthmus does), UNREACHABLE (no way there, or no such name)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class LocalProtocolError(ChannelError):
    code = "LOCAL_PROTOCOL_ERROR"


class RemoteProtocolError(ChannelError):
    code = "REMOTE_PROTOCOL_ERROR"


class CompanionRefused(ChannelError):
    """The companion's typed refusal; `code` is the one it sent (PLAN_MISMATCH, UNKNOWN_MODEL, UNSUPPORTED_OP …)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
