"""Every error that users or peers can cause, in one tree.

::

    StrataError
    |-- StartError                    the process cannot start: printed, exit code 2, not restarted
    |   |-- ConfigError               a flag, variable or key of the configuration file
    |   |-- ModelFileError            a GGUF file that is missing, truncated or malformed
    |   |-- UnsupportedModelError     a well-formed file that this version does not run
    |   |-- TraceFileError            a routing trace that is missing, truncated or damaged
    |   `-- ResourceError             a port, a directory, shared memory that cannot be had
    |-- RequestError                  one request fails; the others go on
    |   |-- InvalidRequestError       400
    |   |   `-- ContextLengthError    400 context_length_exceeded
    |   |-- NotFoundError             404
    |   |-- MethodNotAllowedError     405
    |   |-- PayloadTooLargeError      413
    |   |-- QueueFullError            429, retry
    |   `-- UnavailableError          503, retry
    |       |-- ModelLoadingError     the workers are not ready yet, or are being restarted
    |       `-- DrainingError         the server is about to stop
    |-- GenerationError               a request that had begun fails; sent as an error event
    |   |-- WorkerFailedError         a worker process died or stopped answering
    |   |-- StepStalledError          a step made no progress for the time the watchdog allows
    |   |-- DiskError                 a part of the model's file that it needs cannot be read
    |   `-- ModelOutputError          the model produced numbers nobody can sample from
    `-- ProtocolError                 a peer process said something it may not say

Messages say what, value, limit and remedy, in words a reader who did not build this can act on.
"""

import errno
import os
from typing import ClassVar


class StrataError(Exception):
    """Base of all of them."""


class StartError(StrataError):
    """The process cannot start; its message is printed and the exit code is 2."""

    exit_code: ClassVar[int] = 2


class ConfigError(StartError):
    """A setting is unknown, has the wrong type, or is out of range."""


class ModelFileError(StartError):
    """A model file is missing, unreadable, truncated or not a GGUF file."""


class UnsupportedModelError(StartError):
    """The file is a valid GGUF file, but describes something this version does not run."""


class TraceFileError(StartError):
    """A routing trace is missing, unreadable, truncated or damaged."""


class ResourceError(StartError):
    """Something the machine should provide is missing: a free port, shared memory, a directory."""


class RequestError(StrataError):
    """One HTTP request cannot be served. Carries what the OpenAI error object needs."""

    status: ClassVar[int] = 500
    error_type: ClassVar[str] = "api_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s


class InvalidRequestError(RequestError):
    """The body, or a field of it, is wrong."""

    status = 400
    error_type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """The prompt does not fit into the context."""

    default_code = "context_length_exceeded"


class NotFoundError(RequestError):
    """No such model or path."""

    status = 404
    error_type = "invalid_request_error"
    default_code = "not_found"


class MethodNotAllowedError(RequestError):
    """The path exists, but not for this method."""

    status = 405
    error_type = "invalid_request_error"
    default_code = "method_not_allowed"


class PayloadTooLargeError(RequestError):
    """The body is larger than the server accepts."""

    status = 413
    error_type = "invalid_request_error"
    default_code = "request_too_large"


class QueueFullError(RequestError):
    """As many requests wait as the server keeps; trying later helps."""

    status = 429
    error_type = "rate_limit_error"
    default_code = "queue_full"


class UnavailableError(RequestError):
    """The server cannot take requests just now; trying later helps."""

    status = 503
    error_type = "service_unavailable_error"
    default_code = "unavailable"


class ModelLoadingError(UnavailableError):
    """The workers are loading the model, or are being restarted."""

    default_code = "model_loading"


class DrainingError(UnavailableError):
    """The server finishes what it began and takes nothing new."""

    default_code = "draining"


class GenerationError(StrataError):
    """A request fails after it was accepted; `code` is stable for clients."""

    default_code: ClassVar[str] = "generation_failed"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        """`code` is given where the error is another process's, handed on."""
        super().__init__(message)
        self.code = code if code is not None else self.default_code


class WorkerFailedError(GenerationError):
    """A worker died or fell silent while requests depended on it."""

    default_code = "worker_failed"


class StepStalledError(GenerationError):
    """A step made no progress within the watchdog's time."""

    default_code = "step_stalled"


class ModelOutputError(GenerationError):
    """The logits hold NaN or infinities."""

    default_code = "invalid_model_output"


class DiskError(GenerationError):
    """What a request needs of the model's file could not be read."""

    default_code = "disk_error"

    @classmethod
    def of(cls, file: str, what: str, error_number: int) -> "DiskError":
        """`file` is the file's name, `what` the part of it, `error_number` the errno."""
        reason, remedy = os.strerror(error_number), "check the disk (dmesg)"
        if error_number == errno.ENODATA:
            reason, remedy = "the file has become shorter", "download or copy it again, then restart Strata"
        return cls(f"{what} could not be read from {file}: {reason}; {remedy}")


class ProtocolError(StrataError):
    """A peer sent a message that does not decode, or one that its role does not send."""
