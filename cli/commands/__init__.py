"""The subcommands of `baton`, a module each; `cli/main.py` imports only the one that runs."""
