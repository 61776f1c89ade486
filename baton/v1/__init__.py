"""Generated protobuf code of `protos/baton/v1`; `make protos` writes it, nobody edits it."""
