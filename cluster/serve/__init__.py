"""A whole deployment: a gateway, the fleet behind it, and what joins the two."""
