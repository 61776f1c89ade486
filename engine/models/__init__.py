"""Model architectures, written out literally; knows no request and no block table."""
