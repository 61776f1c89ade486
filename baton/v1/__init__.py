"""Generated protobuf code of `protos/baton/v1`; `make protos` writes it, do not edit."""
