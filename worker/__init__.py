"""One worker process: its loop, its end of the request plane, drain, change of role, metrics and trace."""
