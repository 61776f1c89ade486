"""Workers as child processes on one machine, without Ray."""
