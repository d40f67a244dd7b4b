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
        """Adds what each host has.

        Args:
            tensors: A nest of tensors of the same shapes on all hosts, or of `None`.
        """
        return tensors

    def agree(self, flag: Any) -> Any:
        """Tells whether something holds on all hosts.

        Args:
            flag: Whether it does here: a bool, or a bool scalar.
        """
        return flag

    def broadcast(self, value: T) -> T:
        """Returns what the first host has, such as a choice, or a time measured."""
        return value


ONE_HOST = OneHost()
