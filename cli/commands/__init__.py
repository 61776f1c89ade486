"""What the `baton` command's subcommands do, a module each; `cli/main.py` imports the one that is asked for."""
