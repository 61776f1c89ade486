"""What a process needs of its machine: sockets and their keys, logs, signals, clocks that stop, metrics as text."""
