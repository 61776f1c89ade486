"""The whole hand-over in one thread on virtual time, with seeded faults; every promise is checked after every event.

    python -m tests.simulation --seed 7 --verbose      # what happened in one seed
    make simulate-faults SEEDS=100000                  # a long run

world.py       the heap of events, time, chance, and the log whose hash says whether two runs were the same
scenario.py    what a seed is: workers, requests, a network, and which faults come when
network.py     messages between workers: late, lost, doubled, damaged, overtaken, cut off
reading.py     one-sided reads of a peer's pool: slow, torn, failing, hanging
device.py      a device whose KV is a function of the tokens, and which notices every slot that is not what it should be
connector.py   the connector's worker half without a thread, and a ledger of what it holds
worker.py      one life of a worker: the real engine core, scheduler, endpoint and role
gateway.py     the gateway's own dispatcher, and clients that check what they get
request_plane.py  messages between gateway and workers, which can be cut off from each other
faults.py      carries the scenario's faults out
invariants.py  what must hold after every event, and at rest
run.py         plays a seed; runs.py: many, on all cores
planted.py     bugs put in on purpose, to see that each is found
"""
