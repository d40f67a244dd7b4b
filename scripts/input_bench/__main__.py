"""Is a contender; see `worker`."""

from .worker import main

main()
