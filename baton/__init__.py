"""The vocabulary of all packages: requests, step plans, KV references, errors, messages, configuration."""
