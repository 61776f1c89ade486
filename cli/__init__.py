"""The `baton` command: its subcommands, what they draw on a terminal, and pictures of traces."""
