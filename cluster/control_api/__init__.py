"""The control API of a fleet: a table of calls, a client, carriers that know no call; what owners and gateways ask."""
