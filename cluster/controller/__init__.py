"""Which workers there should be, and what to do about those there are; knows no Ray and no request."""
