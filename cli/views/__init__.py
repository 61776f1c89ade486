"""An operator's view of a fleet, drawn from the gateway's description of it; makes no calls, and knows no clock."""
