"""The hand-over as pure state machines: events and the time in, effects out; no socket, thread or clock."""
