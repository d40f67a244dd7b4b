"""What befalls runs, on purpose; the figures are in docs/trust/reliability.md."""
