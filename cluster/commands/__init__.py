"""What the `baton` command's subcommands do, a module each; `cluster/cli.py` imports the one that is asked for."""
