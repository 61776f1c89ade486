"""Who may come in, and how much each may ask for; knows neither gRPC nor HTTP."""
