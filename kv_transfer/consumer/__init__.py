"""The consumer: pieces from others are written to this rank's pool, and checked."""
