"""KVConnectorScheduler: the connector's half for the scheduler; kv_transfer/connector/worker.py moves bytes.

Implements `scheduler.KVConnector` with two parts, one from each role: the prefill role's part produces, the decode
role's part consumes. Both parts always exist: a worker may change its role while transfers of its old role end.
"""

from baton.kv_groups import ONE_GROUP, KVGroups
from baton.step import KVConnectorOutput, SchedulerOutput
from decode_worker import KVConsumerScheduler
from kv_transfer import KVConnectorMetadata
from prefill_worker import KVProducerScheduler
from scheduler import Request


class KVConnectorScheduler:
    """Passes each call to the part of the request's role, and joins both parts' commands for a step."""

    def __init__(self, block_size: int, groups: KVGroups = ONE_GROUP) -> None:
        self._producer = KVProducerScheduler(block_size, groups)
        self._consumer = KVConsumerScheduler(block_size, groups)

    def request_added(self, request: Request) -> None:
        (self._producer if request.is_producer else self._consumer).request_added(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        return self._consumer.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, block_ids: tuple[int, ...], num_external_tokens: int
    ) -> None:
        self._consumer.update_state_after_alloc(request, block_ids, num_external_tokens)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self._consumer.update_connector_output(output)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata | None:
        of_sends, completed = self._producer.build(scheduler_output)
        of_loads, loads = self._consumer.build()
        if not of_sends and not of_loads and not loads and not completed:
            return None
        return KVConnectorMetadata(at_once=(*of_sends, *of_loads), loads=tuple(loads), after=tuple(completed))

    def request_finished(self, request: Request, block_ids: tuple[int, ...]) -> bool:
        if request.is_producer:
            return self._producer.request_finished(request, block_ids)
        return self._consumer.request_finished(request)
