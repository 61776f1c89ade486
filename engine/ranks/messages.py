"""What rank 0 of a worker and its other ranks tell each other, as typed msgpack.

    rank 0 -> rank     Setup | Join | Plan | Orders | Stop
    rank -> rank 0     Loaded | Ready | StartFailed | StepFailed | RankFailed | News | Report

    rank 0                                     rank 1 ..
     |--- Setup -------------------------------->|   builds its part of the model, its pool, its connector
     |<-- Loaded --------------------------------|
     |--- Join --------------------------------->|   when all have loaded: their collectives connect, and
     |<-- Ready ---------------------------------|   each makes what computes its steps, all at the same time
     |--- Plan, Orders ------------------------->|   in the order of rank 0's own
     |<-- News, Report --------------------------|
     |--- Stop --------------------------------->|

A rank says nothing of a step that it has computed: it computes them in order, and who waits for it waits in the
collectives. It says once what it failed at, and ends.
"""

from dataclasses import dataclass

from baton.messages.wire import Codec
from baton.step import KVConnectorOutput, SchedulerOutput
from baton.system.curve import PlaneKeys
from baton.worker import KVPeerCounts
from kv_transfer import KVConnectorMetadata


@dataclass(frozen=True, slots=True)
class Setup:
    """What a rank is to be; the first message. Keys travel here, not in arguments or the environment."""

    rank: int
    num_ranks: int
    config: str
    """BatonConfig as JSON."""
    kv_keys: PlaneKeys | None
    model_path: str
    incarnation: str
    """Of the worker."""
    meeting_file: int
    """A descriptor that the rank inherits: where the ranks' collectives find each other."""


@dataclass(frozen=True, slots=True)
class Join:
    """All ranks have loaded: connect the collectives, and get ready for steps."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, without the connector's orders."""

    plan: SchedulerOutput


@dataclass(frozen=True, slots=True)
class RankCommands:
    """For the rank's connector."""

    commands: KVConnectorMetadata
    """Those whose moment has come on rank 0."""
    num_computed: int
    """Plans that this rank must have computed before: as many as rank 0 had."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Compute what was planned, and end."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rank's part of the model is in memory, and its KV plane listens."""

    kv_address: str
    num_blocks: int
    digest: str
    """Of the model."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Plans may come."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The rank could not be what it was to be."""

    kind: str
    """The name of a class of baton/errors.py; any other stands for an error of our own."""
    error: str


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The rank's device raised."""

    step: int
    error: str


@dataclass(frozen=True, slots=True)
class RankFailed:
    """Something else in the rank raised."""

    error: str


@dataclass(frozen=True, slots=True)
class News:
    """From the rank's connector."""

    news: KVConnectorOutput


@dataclass(frozen=True, slots=True)
class Report:
    """How the rank's connector stands."""

    counters: dict[str, int]
    peers: tuple[KVPeerCounts, ...]


ToRank = Setup | Join | Plan | RankCommands | Stop
FromRank = Loaded | Ready | StartFailed | StepFailed | RankFailed | News | Report

MAX_PLAN_BYTES = 2**30
"""A plan has every prompt that begins with it, also what of it lies in blocks already: of 256 requests over one
document of 131,072 tokens, 160 MiB. Too large a plan would be the worker's end."""

TO_RANK: Codec[ToRank] = Codec(Setup, Join, Plan, RankCommands, Stop, max_bytes=MAX_PLAN_BYTES)
FROM_RANK: Codec[FromRank] = Codec(Loaded, Ready, StartFailed, StepFailed, RankFailed, News, Report)
