"""Run any function through a wrapped model's forward."""
