"""The gRPC frontend: protobuf in, protobuf out. The only package that knows the messages of protos/."""
