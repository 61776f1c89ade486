"""The subcommands of `baton`; `cli/main.py` imports only the module of the one that runs."""
