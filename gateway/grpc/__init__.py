"""The gRPC frontend: protobuf in, protobuf out. Besides the client, only this package knows the messages of protos/."""
