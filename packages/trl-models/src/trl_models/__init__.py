"""All trl-* model utilities under one lazy import, with example trainers."""
