"""One worker process: its step loop, request plane, drain, role changes, metrics and trace; knows no text."""
