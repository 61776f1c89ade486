"""The cluster in virtual time: world, network, devices, workers, gateways; runs the real decisions, knows no torch.

One thread runs everything, and a seed decides every random draw, so a run can be repeated byte for byte.

world.py           the heap of events, clocks, randomness, and a log whose hash identifies a run
network.py         the KV plane, with seeded faults; pools.py: one-sided reads of a peer's pool
model.py           the model: pure functions of prompt and position
device.py          a device whose KV is a function of the tokens, and which notices every wrong slot
connector.py       the connector's worker half without a thread; leases.py checks when its leases end
worker.py          one incarnation of a worker: the real core, scheduler, endpoint and role
driver.py          the gateway's own dispatcher on virtual time
gateway.py         a gateway, and clients that check what they get; worker_links.py: the gateway's sessions
fleet.py           the workers and gateways of one world
timed_worker.py    the real scheduler over a device that only takes time
timed_fleet.py     timed workers behind the real dispatcher and router; workloads.py: the clients' requests
queueing_fleet.py  workers as queues, for the real autoscaler and planner
"""
