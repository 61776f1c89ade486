"""Messages between processes: the request plane, its sessions, and the codec of all planes."""
