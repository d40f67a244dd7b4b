"""What hosts that train together agree on. So far there is one, and nothing to ask.

With one host each method returns what it gets: no operation is made, and none runs.
Several hosts are another class with these methods, which `Plan.hosts` holds then.
"""

from typing import Any, TypeVar

T = TypeVar("T")


class OneHost:
    """A host that trains by itself.

    Attributes:
        count: Number of hosts.
        index: Which of them this one is.
    """

    count, index = 1, 0

    def sum(self, tensors: T) -> T:
        """Adds a nest of tensors, or of `None`, of the same shapes on all hosts."""
        return tensors

    def agree(self, flag: Any) -> Any:
        """Tells whether a flag, a bool or a bool scalar, is set on all hosts."""
        return flag

    def broadcast(self, value: T) -> T:
        """Returns what the first host has, such as a choice, or a time measured."""
        return value


ONE_HOST = OneHost()
