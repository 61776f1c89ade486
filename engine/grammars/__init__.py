"""Grammars: compiled, then followed token by token; the only user of llguidance."""
