"""The producer: pieces of this rank's pool go out."""
