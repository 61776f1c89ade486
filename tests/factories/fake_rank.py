"""A rank whose device and connector do what plans and commands say: `python -m tests.factories.fake_rank FD`.

One part of its steps is real: they meet the other ranks in a collective. The rank writes what it did to the
file `rank-R.txt`, in the folder that the configuration gives as the model's.
"""

import os
import time
from collections.abc import Callable, Set
from pathlib import Path

import torch

from baton.clock import SystemClock
from baton.config import BatonConfig
from baton.errors import ModelError
from baton.step import CachedRequestData, KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from baton.system.progress import Progress
from baton.worker import KVPeerCounts
from engine.collectives import Collectives
from engine.pipeline import Pipeline, ThreadedPipeline
from engine.ranks import entry as rank_start
from engine.ranks.messages import Setup
from engine.ranks.process import Rank
from engine.ranks.process import main as serve
from engine.step_failures import FailStop
from kv_transfer import KVConnectorMetadata
from simulator.device import Computed

FAKE_RANK = "tests.factories.fake_rank"
NUM_BLOCKS = 20
DIGEST = "digest"

# What a plan does to one rank. The plan contains a request with the id "VERB-RANK".
RAISE, DIE, STALL, DELAY = "raise", "die", "stall", "delay"
DELAY_S = 0.5
HANG_S = 1.0
"""Limit for the transfer of a request called "stuck", which never ends."""


def make_plan(step: int, *request_ids: str) -> SchedulerOutput:
    """A plan with one token for each request."""
    tokens = dict.fromkeys(request_ids or ("r",), 1)
    return SchedulerOutput((), CachedRequestData(), tokens, len(tokens), frozenset(), frozenset(), step=step)


class Diary:
    """A file with one line for each action of a rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank-{rank}.txt"

    def write(self, line: str) -> None:
        with self._path.open("a") as file:
            print(line, file=file)

    @staticmethod
    def of(folder: Path, rank: int) -> list[str]:
        return (folder / f"rank-{rank}.txt").read_text().splitlines()


class CollectiveRunner:
    """Samples the sum of the step numbers of all ranks. Does to its own rank what the plan says."""

    def __init__(self, collectives: Collectives, diary: Diary) -> None:
        self._collectives = collectives
        self._diary = diary

    def launch(self, plan: SchedulerOutput) -> Computed:
        for request_id in plan.num_scheduled_tokens:
            match request_id.split("-"):
                case ["collectives"]:
                    self._diary.write(str(self._all_of_them()))
                case [verb, rank] if rank == str(self._collectives.rank):
                    self._act(verb)
        x = torch.tensor([plan.step])
        self._collectives.all_reduce_(x)
        self._diary.write(f"step {plan.step}")
        return Computed(ModelRunnerOutput({"sum": [int(x.item())]}))

    def _all_of_them(self) -> list[object]:
        """The result of each collective. Every rank gets the same results."""
        collectives, rank = self._collectives, float(self._collectives.rank)
        results: list[object] = []
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x_TE = torch.full((2, 3), 1.0 + rank, dtype=dtype)
            collectives.all_reduce_(x_TE)
            results.append(x_TE.unique().tolist())
            mine = torch.tensor([[rank, 10.0 + rank], [20.0 + rank, 30.0 + rank]], dtype=dtype)
            results.append(collectives.all_gather(mine).tolist())
        token_ids_R = torch.tensor([7, 8]) + self._collectives.rank
        collectives.broadcast_(token_ids_R)
        results.append(token_ids_R.tolist())
        return results

    def _act(self, verb: str) -> None:
        match verb:
            case "raise":
                raise ValueError("the device is on fire")
            case "die":
                os._exit(7)
            case "stall":
                time.sleep(600)
            case "delay":
                time.sleep(DELAY_S)


def make_fake_pipeline(collectives: Collectives, diary: Diary) -> Pipeline:
    return ThreadedPipeline(FailStop(CollectiveRunner(collectives, diary)))


class DiaryConnector:
    """Writes its commands down. Its loads complete at once."""

    kv_address = "tcp://127.0.0.1:1"

    def __init__(self, diary: Diary, on_kv_output: Callable[[], None], kv_address: str = kv_address) -> None:
        self.kv_address = kv_address
        self._diary = diary
        self._on_kv_output = on_kv_output
        self._quiesced: tuple[str, ...] = ()
        self._num_loads = 0
        self.progress = Progress("its KV transfer", SystemClock(), HANG_S)

    def start(self) -> None:
        self._diary.write("start")

    def send_commands(self, metadata: KVConnectorMetadata | None) -> None:
        for command in metadata.at_once if metadata else ():
            self._diary.write(f"at once {type(command).__name__}")

    def start_load_kv(self, metadata: KVConnectorMetadata | None) -> None:
        for command in metadata.loads if metadata else ():
            self._diary.write(f"load {command.request_id}")
            self._quiesced += (command.request_id,)
            self._num_loads += 1
            if command.request_id == "stuck":
                self.progress.begin()
            if command.request_id == "lost":
                raise RuntimeError("the transfer thread has died")
            if command.request_id == "full":
                raise OSError("No space left on device")
            self._on_kv_output()

    def save_kv_blocks(self, metadata: KVConnectorMetadata | None, preempted: Set[str]) -> None:
        for command in metadata.after if metadata else ():
            if command.request_id not in preempted:
                self._diary.write(f"save {command.request_id}")

    def get_finished(self) -> KVConnectorOutput:
        quiesced, self._quiesced = self._quiesced, ()
        return KVConnectorOutput(quiesced=quiesced)

    def counters(self) -> dict[str, int]:
        return {"kv_loads": self._num_loads}

    def peers(self) -> tuple[KVPeerCounts, ...]:
        return ()

    def shutdown(self) -> None:
        self._diary.write("shutdown")


def build(
    setup: Setup, config: BatonConfig, collectives: Collectives, on_kv_output: Callable[[], None]
) -> Rank:
    """Builds the rank. `model.path` says what fails: `slow`, `no-model`, `broken`, `dead`."""
    match config.model.path:
        case "no-model":
            raise ModelError("no config.json")
        case "broken":
            raise ValueError("out of memory")
        case "dead":
            os._exit(9)
        case "slow":
            time.sleep(600)
    diary = Diary(Path(setup.model_path), setup.rank)
    connector = DiaryConnector(diary, on_kv_output, f"tcp://127.0.0.1:{1 + setup.rank}")
    return Rank(lambda: make_fake_pipeline(collectives, diary), connector, NUM_BLOCKS, DIGEST)


if __name__ == "__main__":
    rank_start.main(lambda: serve(build))
