"""The consumer: writes pieces from other workers to this rank's pool, and checks them."""
