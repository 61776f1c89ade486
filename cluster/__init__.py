"""Places, watches and stops workers on Ray, and holds the `baton` command; no token passes through here."""
