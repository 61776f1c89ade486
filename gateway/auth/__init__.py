"""Authentication, rights and per-caller limits; knows neither gRPC nor HTTP."""
