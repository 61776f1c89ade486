"""The control API of a fleet: the table of its calls, a client, carriers that know no call, a server."""
