"""What a process needs of its machine: sockets and their keys, logs, signals, times without standstills, metrics."""
