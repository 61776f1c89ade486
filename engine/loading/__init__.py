"""From a model's name or folder to weights on a device; knows no request."""
