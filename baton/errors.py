"""Everything a caller can cause, as one tree; our own broken invariants are `assert`s and never appear here.

* BatonError
  x ConfigError             a key of the configuration: its value, and what is allowed
  x ModelError              a model folder: a missing file, an unknown architecture, a wrong shape
  x ClusterError            Ray, or the fleet on it, cannot be had as asked for
    + FleetEnded            the fleet's controller has ended for good, and the fleet with it
  x FleetError              what an operator asked of the fleet cannot be done; says why
    + UnknownWorker         nobody supervises a worker of that name
  x WireError               bytes from a peer that are not a message of ours
  x TraceError              a file that is not a worker's step trace; names the line
  x RequestError            what one request can cause; never harms another request
    + InvalidRequest        the client's mistake; names the field
      + UnknownModel        it asks for a model that is not served here
      + PromptTooLong       its prompt leaves no room for an answer
    + Unauthenticated       no API key, or one that is not known here
    + PermissionDenied      whose key it is may not do this
    + Unsupported           nothing here does that, whatever the request says
    + Overloaded            no room now; says when to come back
      + RateLimited         this caller's own limit is reached, whatever room there is
    + DeadlineTooClose      it could not be met, so nothing was begun
    + WorkerUnavailable     no worker could take or finish it
    + RequestAborted        somebody who may do so ended it
      + DeadlinePassed      its own deadline did
      + SlowReader          its client did not read the answer
"""


class BatonError(Exception):
    """Root of the tree. The message says what happened, with which values, and what to do."""


class ConfigError(BatonError):
    """A configuration key holds something that cannot work."""


class ModelError(BatonError):
    """A model folder cannot be served as it is."""


class ClusterError(BatonError):
    """Ray cannot be reached, has no room, or a worker on it did not start."""


class FleetEnded(ClusterError):
    """The fleet's controller has ended, and nothing starts it again."""


class FleetError(BatonError):
    """An operator's wish for the fleet is refused, or came to nothing; the fleet is as it was."""


class UnknownWorker(FleetError):
    """There is no such worker; names those there are."""


class WireError(BatonError):
    """A peer's bytes could not be decoded: unknown kind, missing field, wrong type or too large."""


class TraceError(BatonError):
    """A file cannot be read as the trace of a worker's steps, or holds nothing of what was asked for."""


class RequestError(BatonError):
    """One request cannot be served. Everything else goes on."""


class InvalidRequest(RequestError):
    """The request contradicts itself or the model. `field` is the client's name for the culprit."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.problem = message
        """The message without the field, for a door that has another name for that."""


class UnknownModel(InvalidRequest):
    """The client means another model than the one that is served."""


class PromptTooLong(InvalidRequest):
    """Clients that know this kind shorten their prompt and try again."""


class Unauthenticated(RequestError):
    """Who asks has not proven who they are. Never holds what they tried it with."""


class PermissionDenied(RequestError):
    """Who asks is known, and may not do this."""


class Unsupported(RequestError):
    """The call exists for clients of other servers; says why nothing answers it here."""


class Overloaded(RequestError):
    """There is no room at present; the same request may succeed after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """The caller asks for more than its key grants: too often, or too much at once."""


class DeadlineTooClose(RequestError):
    """The request's deadline could not be met, though it were served at once."""


class WorkerUnavailable(RequestError):
    """No live worker could take the request, or the one that had it was lost."""


class RequestAborted(RequestError):
    """The request was ended on purpose before it was complete."""


class DeadlinePassed(RequestAborted):
    """The request's time was over before it was complete."""


class SlowReader(RequestAborted):
    """The answer waited for its client for too long, or too much of it did."""
