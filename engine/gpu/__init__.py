"""Steps on a device that works by itself: staged, queued or replayed, sampled, never waited for; knows no scheduler."""
