"""Steps on an asynchronous device: staged, queued or replayed, and sampled without a wait; knows no scheduler."""
