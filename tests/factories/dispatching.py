"""A dispatcher without a gateway: its requests and workers' messages are given to it as events, one by one."""

from itertools import count
from typing import Any

from baton.config import GatewayConfig
from baton.request import FinishReason, RequestOutput
from baton.sampling import SamplingParams
from gateway.auth.callers import ANYBODY, Caller
from gateway.requests.dispatcher import Dispatcher
from gateway.requests.events import Effect, SubmitTo, WorkerLost, WorkerOutputs, WorkerReported
from gateway.requests.request import GatewayRequest
from gateway.requests.retry import LoadFailurePolicy
from gateway.routing.router import Router
from gateway.workers.worker_listener import LossCause
from simulator.driver import SilentText
from tests.factories.routing import status


def make_dispatcher(*workers: str, policy: LoadFailurePolicy = "retry") -> Dispatcher:
    """Workers whose names begin with p prefill."""
    ids = count()
    dispatcher = Dispatcher(
        Router(GatewayConfig(routing_policy="round_robin", routing_mode="disaggregated"), b"key"),
        policy,
        lambda _: str(next(ids)),
        max_in_flight=9,
        max_queued=9,
        placement_timeout_s=30.0,
    )
    for name in workers:
        dispatcher.handle(WorkerReported(status(name)), 0.0)
    return dispatcher


def make_request(request_id: str = "r", caller: Caller = ANYBODY, **fields: Any) -> GatewayRequest:
    """A request whose salt is its id, unless `fields` say otherwise."""
    usual = {
        "prompt_token_ids": (1, 2, 3),
        "sampling_params": SamplingParams(max_tokens=3, seed=0),
        "text": SilentText(),
        "cache_salt": request_id,
    }
    return GatewayRequest(request_id=request_id, caller=caller, **{**usual, **fields})


def submitted(effects: list[Effect]) -> dict[str, str]:
    """Workers that get a sub-request, with its id."""
    return {
        effect.worker: effect.sub_request.request_id for effect in effects if isinstance(effect, SubmitTo)
    }


def outputs(worker: str, engine_id: str, *token_ids: int, end: FinishReason | None = None) -> WorkerOutputs:
    output = RequestOutput(request_id=engine_id, first_position=0, token_ids=token_ids, finish_reason=end)
    return WorkerOutputs(worker, (output,))


def killed(worker: str) -> WorkerLost:
    return WorkerLost(worker, LossCause.DISCONNECTED, "killed")
