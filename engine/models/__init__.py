"""Model architectures, each written out in full; knows no request and no block table."""
