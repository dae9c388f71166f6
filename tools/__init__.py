"""What serves this repository and is not shipped."""
