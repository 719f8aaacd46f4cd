"""Every failure ROSE reports, in one tree with one table to HTTP and gRPC status.

    RoseError
    ├── InvalidInput        400  INVALID_ARGUMENT     the request can never succeed as it is
    ├── UnknownModel        404  NOT_FOUND            no model of that name is served here
    ├── PayloadTooLarge     413  INVALID_ARGUMENT     more bytes or items than one request may carry
    ├── Overloaded          429  RESOURCE_EXHAUSTED   the queue is full; come back after `retry_after_s`
    ├── Cancelled           499  CANCELLED            the caller left
    ├── InternalError       500  INTERNAL             a fault of ours
    │   └── NonFinite       500  INTERNAL             the model produced NaN or infinity for this item
    ├── Unsupported         501  UNIMPLEMENTED        this server cannot do that
    ├── Unavailable         503  UNAVAILABLE          loading, draining, or the replica is gone
    ├── DeadlineExceeded    504  DEADLINE_EXCEEDED    the caller's deadline passed before an answer
    └── StartupError        -    -                    refused before serving anything
        ├── CheckpointError                           a folder that cannot be loaded whole
        ├── TokenizerMismatch                         the front's tokenizer is not the replica's
        └── PullError                                 a model that cannot be had

This room knows neither requests nor carriers: they translate with `http_status`, `grpc_status` and `from_kind`.
"""

from __future__ import annotations

from typing import ClassVar


class RoseError(Exception):
    """Base of every error ROSE raises on purpose.

    Attributes:
        message: what is wrong, in a sentence that names the limit that was broken.
        param: the request field at fault, as the caller spelled it ("input", "dimensions"), or None.
        index: position of the offending item in a list input, or None.
        retry_after_s: seconds after which trying again makes sense, or None.
    """

    kind: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        index: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.index = index
        self.retry_after_s = retry_after_s


class InvalidInput(RoseError):
    kind, http_status, grpc_status = "invalid_input", 400, "INVALID_ARGUMENT"


class UnknownModel(RoseError):
    kind, http_status, grpc_status = "unknown_model", 404, "NOT_FOUND"


class PayloadTooLarge(RoseError):
    kind, http_status, grpc_status = "payload_too_large", 413, "INVALID_ARGUMENT"


class Overloaded(RoseError):
    kind, http_status, grpc_status = "overloaded", 429, "RESOURCE_EXHAUSTED"


class Cancelled(RoseError):
    kind, http_status, grpc_status = "cancelled", 499, "CANCELLED"


class InternalError(RoseError):
    pass


class NonFinite(InternalError):
    kind = "non_finite"


class Unsupported(RoseError):
    kind, http_status, grpc_status = "unsupported", 501, "UNIMPLEMENTED"


class Unavailable(RoseError):
    kind, http_status, grpc_status = "unavailable", 503, "UNAVAILABLE"


class DeadlineExceeded(RoseError):
    kind, http_status, grpc_status = "deadline_exceeded", 504, "DEADLINE_EXCEEDED"


class StartupError(RoseError):
    kind = "startup_error"


class CheckpointError(StartupError):
    kind = "checkpoint_error"


class TokenizerMismatch(StartupError):
    kind = "tokenizer_mismatch"


class PullError(StartupError):
    kind = "pull_error"


WIRE_ERRORS: tuple[type[RoseError], ...] = (
    InvalidInput,
    UnknownModel,
    PayloadTooLarge,
    Overloaded,
    Cancelled,
    InternalError,
    NonFinite,
    Unsupported,
    Unavailable,
    DeadlineExceeded,
)
_BY_KIND = {cls.kind: cls for cls in WIRE_ERRORS}


def from_kind(
    kind: str,
    message: str,
    *,
    param: str | None = None,
    index: int | None = None,
    retry_after_s: float | None = None,
) -> RoseError:
    """Rebuild the error a peer sent. A kind from a newer peer becomes InternalError with the kind in its text."""
    cls = _BY_KIND.get(kind)
    if cls is None:
        cls, message = InternalError, f"{kind}: {message}"
    return cls(message, param=param, index=index, retry_after_s=retry_after_s)
