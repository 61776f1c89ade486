"""A whole cluster on several Ray nodes under fire: processes are killed and stopped while clients stream."""
