"""The connector: what scheduler and engine call, and the thread on which a rank's hand-overs happen."""
