"""How long the parts of a request took, and how fast the latest answers were; has no clock of its own."""
