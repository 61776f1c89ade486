"""The whole hand-over in one thread in virtual time, with seeded faults. Every promise is checked after every event.

    python -m tests.simulation --seed 7 --verbose      # the log of one seed
    make simulate-faults SEEDS=100000                  # a long run

The world, its network, workers and gateways are those of simulator/. This package adds the parts for tests:

scenario.py    a seed's workers, requests, network and faults
faults.py      carries the scenario's faults out
invariants.py  what must hold after every event, and at rest
run.py         plays a seed, or many on all cores
planted.py     bugs planted on purpose, to see that each is found
unmended.py    bugs that were found here, put back with their seeds
"""
