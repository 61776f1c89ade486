"""What an operator sees of a fleet, drawn from the gateway's description of it; asks nobody, and knows no clock."""
