"""Places workers on Ray's nodes, starts them there and watches them; the only user of ray."""
