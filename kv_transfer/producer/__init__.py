"""The producer: sends pieces of this rank's pool."""
