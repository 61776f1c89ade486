"""Which workers should run, and what to do about the workers that run; knows no Ray and no request."""
