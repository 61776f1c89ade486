"""The control API of a fleet: one table of calls, a typed client, and the carriers that know none of the calls."""
