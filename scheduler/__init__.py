"""Which tokens run next, in which blocks; knows no model, no device, no clock and no socket."""
