"""How KV blocks move between workers, and how that can fail; knows no model, no scheduler and no Ray."""
