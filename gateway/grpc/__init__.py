"""The gRPC door: protobuf in, protobuf out. The only room that knows messages of protos/."""
