"""Release one package at a time, and only what must move with it."""
