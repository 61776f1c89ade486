"""Messages between rank 0 of a worker and its other ranks, as typed msgpack.

    rank 0 -> rank     Setup | Join | Plan | RankCommands | Stop
    rank -> rank 0     Loaded | Ready | StartFailed | StepFailed | RankFailed | KVOutput | Report

    rank 0                                     rank 1 ..
     |--- Setup -------------------------------->|   builds its part of the model, its pool, its connector
     |<-- Loaded --------------------------------|
     |--- Join --------------------------------->|   when all have loaded: their collectives connect, and
     |<-- Ready ---------------------------------|   each makes its pipeline, all at the same time
     |--- Plan, RankCommands ------------------->|   in the order in which rank 0 executes its own
     |<-- KVOutput, Report ----------------------|
     |--- Stop --------------------------------->|

A rank does not report computed steps, since the other ranks wait for it in the collectives. It reports its
first failure, and ends. It sends a Report at least every half second, except while it computes a step.
"""

from dataclasses import dataclass

from baton.messages.wire import Codec
from baton.step import KVConnectorOutput, SchedulerOutput
from baton.system.curve import PlaneKeys
from baton.worker import KVPeerCounts
from kv_transfer import KVConnectorMetadata


@dataclass(frozen=True, slots=True)
class Setup:
    """Describes the rank; the first message. Keys travel here, not in arguments or the environment."""

    rank: int
    num_ranks: int
    config: str
    """BatonConfig as JSON."""
    kv_keys: PlaneKeys | None
    model_path: str
    incarnation: str
    """The worker's incarnation."""
    meeting_file: int
    """A descriptor that the rank inherits, of the file through which the ranks' collectives connect."""


@dataclass(frozen=True, slots=True)
class Join:
    """All ranks have loaded: connect the collectives, and prepare for steps."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, without the connector's commands."""

    plan: SchedulerOutput


@dataclass(frozen=True, slots=True)
class RankCommands:
    """Commands for the rank's connector."""

    commands: KVConnectorMetadata
    """The commands that rank 0's connector gets at the same time."""
    num_computed: int
    """How many plans this rank must have computed before: as many as rank 0 had when it sent the commands. 0 for
    commands that are due at once."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Compute the steps that were planned, and end."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rank's part of the model is in memory, and its KV plane listens."""

    kv_address: str
    num_blocks: int
    digest: str
    """The digest of the rank's model."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank is ready for plans."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The rank could not be built."""

    kind: str
    """The name of a class of baton/errors.py; any other name means an internal error."""
    error: str


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The rank's device failed to compute a step."""

    step: int
    error: str


@dataclass(frozen=True, slots=True)
class RankFailed:
    """The rank failed outside a step."""

    error: str


@dataclass(frozen=True, slots=True)
class KVOutput:
    """Outputs of the rank's connector."""

    output: KVConnectorOutput


@dataclass(frozen=True, slots=True)
class Report:
    """Counters of the rank's connector, and a sign of life."""

    counters: dict[str, int]
    peers: tuple[KVPeerCounts, ...]


ToRank = Setup | Join | Plan | RankCommands | Stop
FromRank = Loaded | Ready | StartFailed | StepFailed | RankFailed | KVOutput | Report

MAX_PLAN_BYTES = 2**30
"""A plan contains every prompt that begins in its step, even the part whose KV is cached. 256 requests with
one document of 131,072 tokens take 160 MiB. A plan above this limit would end the worker."""

TO_RANK: Codec[ToRank] = Codec(Setup, Join, Plan, RankCommands, Stop, max_bytes=MAX_PLAN_BYTES)
FROM_RANK: Codec[FromRank] = Codec(Loaded, Ready, StartFailed, StepFailed, RankFailed, KVOutput, Report)
