"""Our own values -> protobuf, for fleets: workers' reports, joined with the controller's description."""

from baton.fleet import NodeDescription, ReplicaDescription
from baton.v1 import cluster_service_pb2 as pb
from baton.worker import KVPeerCounts, WorkerStatus
from gateway.grpc.convert import filled
from gateway.requests.dispatcher import Dispatcher
from gateway.workers.fleet_view import ControllerView, WorkerView, name_key


def worker_to_message(view: WorkerView) -> pb.Worker:
    """Describes one worker. Before the worker's first heartbeat, the message has no numbers."""
    endpoint = view.endpoint
    message = pb.Worker(
        name=view.name,
        role=view.role.value,
        state=view.state,
        incarnation=endpoint.ref.incarnation if endpoint else "",
        node=view.node,
        pid=endpoint.pid if endpoint else 0,
        threads=endpoint.num_threads if endpoint else 0,
        cpus=endpoint.cpus if endpoint else (),
        quantization=endpoint.quantization if endpoint else "",
        kv_blocks=pb.KVBlocks(),
        requests=pb.Requests(),
        load=pb.Load(),
        slot=_slot_to_message(view.replica) if view.replica else None,
    )
    if view.status is not None:
        try:
            message.MergeFrom(_status_to_message(view.status))
        except ValueError as error:  # a count below 0, or too large for its field: the worker is faulty
            message.failure = f"its last heartbeat has an impossible number: {error}"
    return message


def controller_to_message(view: ControllerView) -> pb.Controller:
    if view.fleet is None:
        return pb.Controller(state=view.state, failure=view.failure)
    return pb.Controller(
        state=view.state, incarnation=view.fleet.controller_incarnation, decisions=view.fleet.decisions
    )


def node_to_message(node: NodeDescription) -> pb.Node:
    return filled(
        pb.Node,
        node,
        resources=dict(node.resources),
        workers=sorted(node.workers, key=name_key),
    )


def gateway_to_message(dispatcher: Dispatcher) -> pb.Gateway:
    return pb.Gateway(
        in_flight=dispatcher.num_in_flight,
        queued=dispatcher.num_queued,
        paths=dispatcher.tally.paths,
        counters=dispatcher.tally.counters,
    )


def hide_internals(description: pb.DescribeClusterResponse) -> None:
    """Removes what only administrators may see.

    These are machines (whose names may be addresses), processes and paths. Failures are removed too, since
    their text may contain any of these.
    """
    description.ClearField("model_path")
    description.ClearField("nodes")
    description.controller.ClearField("failure")
    for worker in description.workers:
        worker.ClearField("node")
        worker.ClearField("pid")
        worker.ClearField("cpus")
        worker.ClearField("failure")
        if worker.HasField("slot"):
            worker.slot.ClearField("node")
            worker.slot.ClearField("last_failure")


def _status_to_message(status: WorkerStatus) -> pb.Worker:
    """The fields that the gateway learns only from a heartbeat."""
    return pb.Worker(
        kv_blocks=filled(pb.KVBlocks, status.kv_blocks),
        requests=filled(pb.Requests, status.requests),
        load=filled(pb.Load, status.load, queued_prompt_tokens=status.load.num_queued_prompt_tokens),
        counters=status.counters,
        kv_peers=map(_kv_peer_to_message, status.kv_peers),
        failure=status.failure,
    )


def _slot_to_message(replica: ReplicaDescription) -> pb.Slot:
    return filled(
        pb.Slot,
        replica,
        state=replica.state.value,
        role=replica.role.value,
        starts=replica.num_starts,
    )


def _kv_peer_to_message(counts: KVPeerCounts) -> pb.KVPeer:
    return filled(pb.KVPeer, counts, role=counts.role.value, bytes=counts.num_bytes)
