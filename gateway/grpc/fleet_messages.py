"""Our own values -> protobuf, for the fleet: workers' statuses, joined with their controller's description."""

from collections.abc import Iterable

from baton.fleet import FleetDescription, NodeDescription, ReplicaDescription, RolloutStep
from baton.v1 import cluster_service_pb2 as pb
from baton.worker import KVPeerCounts, WorkerStatus
from gateway.requests.record import Tally
from gateway.workers.appearance import in_order, state_of, state_without_process
from gateway.workers.worker_client import WorkerClient


def workers_to_messages(
    clients: Iterable[WorkerClient], replicas: Iterable[ReplicaDescription]
) -> list[pb.Worker]:
    """Every worker there is or should be, by name: `w2` before `w10`."""
    by_name: dict[str, pb.Worker] = {}
    waiting = {replica.name: replica for replica in replicas}
    for client in clients:
        by_name[client.name] = _worker_to_message(client, waiting.pop(client.name, None))
    for replica in waiting.values():
        by_name[replica.name] = _missing_to_message(replica)
    return [by_name[name] for name in sorted(by_name, key=in_order)]


def controller_to_message(fleet: FleetDescription) -> pb.Controller:
    return pb.Controller(
        state="answering", incarnation=fleet.controller_incarnation, decisions=fleet.decisions
    )


def node_to_message(node: NodeDescription) -> pb.Node:
    return pb.Node(
        name=node.name,
        address=node.address,
        is_alive=node.is_alive,
        is_head=node.is_head,
        is_leaving=node.is_draining,
        resources=dict(node.resources),
        workers=sorted(node.workers, key=in_order),
    )


def step_to_message(step: RolloutStep) -> pb.RolloutFleetResponse:
    return pb.RolloutFleetResponse(
        worker=step.worker, incarnation=step.incarnation, done=step.done, count=step.count
    )


def gateway_to_message(num_in_flight: int, num_queued: int, tally: Tally) -> pb.Gateway:
    return pb.Gateway(in_flight=num_in_flight, queued=num_queued, paths=tally.paths, counters=tally.counters)


def hide_inside(description: pb.DescribeClusterResponse) -> None:
    """Removes what only administrators may see: machines (whose names may be addresses), processes, paths, and
    failures, whose text may name any of these."""
    description.ClearField("model_path")
    description.ClearField("nodes")
    description.controller.ClearField("failure")
    for worker in description.workers:
        worker.ClearField("node")
        worker.ClearField("pid")
        worker.ClearField("failure")
        if worker.HasField("slot"):
            worker.slot.ClearField("node")
            worker.slot.ClearField("last_failure")


def _worker_to_message(client: WorkerClient, replica: ReplicaDescription | None) -> pb.Worker:
    """A worker as of its last heartbeat; before the first, `starting` and without numbers."""
    endpoint, status = client.endpoint, client.status
    message = pb.Worker(
        name=endpoint.ref.name,
        role=(status.role if status else endpoint.role).value,
        state=state_of(client, replica),
        incarnation=endpoint.ref.incarnation,
        node=endpoint.node,
        pid=endpoint.pid,
        kv_blocks=_blocks_to_message(status),
        requests=_requests_to_message(status),
        load=_load_to_message(status),
        slot=_slot_to_message(replica),
    )
    if status is not None:
        message.counters.update(status.counters)
        message.kv_peers.extend(map(_kv_peer_to_message, status.kv_peers))
        message.failure = status.failure
    return message


def _missing_to_message(replica: ReplicaDescription) -> pb.Worker:
    """A worker whose process the gateway does not know, if there is one."""
    return pb.Worker(
        name=replica.name,
        role=replica.role.value,
        state=state_without_process(replica),
        node=replica.node,
        kv_blocks=pb.KVBlocks(),
        requests=pb.Requests(),
        load=pb.Load(),
        slot=_slot_to_message(replica),
    )


def _slot_to_message(replica: ReplicaDescription | None) -> pb.Slot | None:
    if replica is None:
        return None
    return pb.Slot(
        state=replica.state.value,
        role=replica.role.value,
        node=replica.node,
        starts=replica.num_starts,
        last_failure=replica.last_failure,
        next_start_in_s=replica.next_start_in_s,
    )


def _blocks_to_message(status: WorkerStatus | None) -> pb.KVBlocks:
    if status is None:
        return pb.KVBlocks()
    blocks = status.kv_blocks
    return pb.KVBlocks(
        total=blocks.total,
        free=blocks.free,
        quarantined=blocks.quarantined,
        leased=blocks.leased,
        host_total=blocks.host_total,
        host_used=blocks.host_used,
    )


def _requests_to_message(status: WorkerStatus | None) -> pb.Requests:
    if status is None:
        return pb.Requests()
    requests = status.requests
    return pb.Requests(
        running=requests.running,
        waiting=requests.waiting,
        waiting_for_remote_kvs=requests.waiting_for_remote_kvs,
    )


def _load_to_message(status: WorkerStatus | None) -> pb.Load:
    if status is None:
        return pb.Load()
    load = status.load
    return pb.Load(
        queued_prompt_tokens=load.num_queued_prompt_tokens,
        oldest_waiting_s=load.oldest_waiting_s,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        decode_step_s=load.decode_step_s,
    )


def _kv_peer_to_message(counts: KVPeerCounts) -> pb.KVPeer:
    return pb.KVPeer(
        role=counts.role.value,
        peer=counts.peer,
        transport=counts.transport,
        done=counts.done,
        failed=counts.failed,
        not_needed=counts.not_needed,
        bytes=counts.num_bytes,
        queued_s=counts.queued_s,
        moving_s=counts.moving_s,
        exposed_s=counts.exposed_s,
    )
