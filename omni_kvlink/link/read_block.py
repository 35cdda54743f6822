"""`ReadBlock`: what the end of a reader's `with` block tells the producer."""

from __future__ import annotations


class ReadBlock:
    """Base of what a reader holds of a payload, which the end of its `with` block releases.

    A block that ends normally releases it as read if the reader has taken it to its end. Else, and
    whenever an exception leaves the block, it is released unread: another reader receives it, or
    its receipt says that nobody did. `release` and `release_unread` decide before; the first call
    counts.
    """

    @property
    def _is_taken(self) -> bool:
        """Whether the reader has taken it to its end; one that came whole, it has."""
        return True

    def release(self) -> None:
        """Release it as read."""
        raise NotImplementedError

    def release_unread(self) -> None:
        """Release it so that another reader receives it."""
        raise NotImplementedError

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None and self._is_taken:
            self.release()
        else:
            self.release_unread()
