"""Generated protobuf code of interfaces that others defined; `make protos` writes it, do not edit."""
