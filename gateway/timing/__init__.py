"""Where the time of a request went, and how fast the latest answers were; knows no clock of its own."""
