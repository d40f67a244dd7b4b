"""What befalls runs, on purpose; the figures are in docs/reliability.md."""
