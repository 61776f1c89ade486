"""The connector: the interface for scheduler and engine, and the thread that runs a rank's hand-overs."""
