"""All errors that a caller can cause, as one tree; Baton's own broken invariants are `assert`s instead.

* BatonError
  x ConfigError             a configuration key: its value, and what is allowed
  x ModelError              a model folder: a missing file, a wrong shape, weights that compute no first token
  x ClusterError            Ray, or the fleet on it, is not available as requested
    + FleetEnded            the fleet's controller has ended for good, and the fleet with it
    + OtherFleetVersion     the fleet belongs to another version of Baton; names both versions
  x FleetError              an operator's command to the fleet failed; says why
    + UnknownWorker         the fleet has no worker of that name
  x WireError               bytes from a peer that are not a valid message
  x TraceError              a file that is not a worker's step trace; names the line
  x RequestError            what one request can cause; never harms another request
    + InvalidRequest        the client's mistake; names the field
      + UnknownModel        the request names a model that is not served here
      + PromptTooLong       the prompt leaves no room for an answer
      + UnknownResponse     the caller has no stored response of that id
        + UnknownPreviousResponse   a request continues such a response
    + HarmfulRequest        one worker after another ended, or could not compute it; it is not tried again
    + Unauthenticated       no API key, or an unknown one
    + KeysUnavailable       the file of API keys is gone, or others can change it
    + PermissionDenied      the caller may not do this
    + Unsupported           no request can have this feature here
    + Overloaded            no room now; says when to try again
      + RateLimited         this caller's own limit is reached, even if there is room
    + DeadlineTooClose      the deadline cannot be met, so the request was not started
    + WorkerUnavailable     no worker could accept or finish the request
    + GatewayStopping       the gateway ended before the request
    + StoreUnavailable      the store of responses cannot be reached
    + RequestAborted        an authorized caller ended the request
      + DeadlinePassed      the request's own deadline passed
      + SlowReader          the client did not read the answer in time
"""


class BatonError(Exception):
    """Root of the tree. The message says what happened, with which values, and what to do."""


class ConfigError(BatonError):
    """A configuration key has a value that cannot work."""


class ModelError(BatonError):
    """A model folder cannot be served as it is."""


class ClusterError(BatonError):
    """Ray cannot be reached or has no room, or a worker on it did not start."""


class FleetEnded(ClusterError):
    """The fleet's controller has ended, and will not start again."""


class OtherFleetVersion(ClusterError):
    """The fleet has the messages of another version of Baton. It understood no call, so it carried out none."""


class FleetError(BatonError):
    """An operator's command was refused or failed; the message says why."""


class UnknownWorker(FleetError):
    """No worker has this name. The message lists the workers that exist."""


class WireError(BatonError):
    """A peer's bytes could not be decoded: unknown kind, missing field, wrong type or too large."""


class TraceError(BatonError):
    """A file cannot be read as a worker's step trace, or does not contain what was requested."""


class RequestError(BatonError):
    """One request cannot be served. Other requests are not affected."""


class InvalidRequest(RequestError):
    """The request contradicts itself or the model. `field` is the client's name for the field at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.problem = message
        """The message without the field, for APIs that call the field something else."""


class UnknownModel(InvalidRequest):
    """The client names another model than the one that is served."""


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for an answer. Clients that know this kind shorten their prompt and try again.

    Many clients recognize this error only by the words of its message: TOO_LONG is Anthropic's, and "this model's
    maximum context length is" OpenAI's and vLLM's.
    """


TOO_LONG = "prompt is too long"
"""The message of a PromptTooLong begins with these words."""


class UnknownResponse(InvalidRequest):
    """The response was never stored, is gone, or belongs to another caller; callers must not learn which."""


class UnknownPreviousResponse(UnknownResponse):
    """A request continues a response that this caller does not have. Clients send the whole conversation instead."""


class HarmfulRequest(RequestError):
    """Workers ended under the request, or could not compute it, so no other worker gets it for some minutes."""


class Unauthenticated(RequestError):
    """The caller is not authenticated. The error never contains the credentials."""


class KeysUnavailable(RequestError):
    """The gateway's key file is gone, or other users can change it, so no key in it is accepted."""


class PermissionDenied(RequestError):
    """The caller may not do this, or the request names a host that is not served. Another key or name may help."""


class Unsupported(RequestError):
    """The call exists for clients of other servers. The message says why it is not supported here."""


class Overloaded(RequestError):
    """There is no room at present; the same request may succeed after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """The caller asks for more than its key grants: too often, or too much at once."""


class DeadlineTooClose(RequestError):
    """The request's deadline cannot be met, even if it were served at once."""


class WorkerUnavailable(RequestError):
    """No live worker could accept the request, or the request's worker was lost."""


class GatewayStopping(RequestError):
    """The gateway ends, and this request did not end in time. Another gateway can serve it."""


class StoreUnavailable(RequestError):
    """The store of responses did not answer, so it is unknown which responses it has."""


class RequestAborted(RequestError):
    """The request was ended on purpose before it was complete."""


class DeadlinePassed(RequestAborted):
    """The request's deadline passed before it was complete."""


class SlowReader(RequestAborted):
    """The client left too much of its answer unread, or for too long."""
