"""The vocabulary every floor shares: requests, step plans, KV references, messages, config, errors, clock."""
