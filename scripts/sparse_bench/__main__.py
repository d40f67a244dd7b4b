"""Computes with one framework; see `worker`."""

from .worker import main

main()
