"""Ranks: what all ranks of a group have to agree on, so that their trees stay equal."""

from __future__ import annotations

from ..agreement import Agreement


class Ranks:
    """Decisions of this rank's tree that hold on all of them.

    If other ranks are lost, this one decides for itself, as the engine here may go on.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return not self._agreement.needed

    def smallest(self, value: int) -> int:
        """Return the smallest value of all ranks."""
        return value if self._agreement.broken else self._agreement.smallest([value])[0]

    def all(self, here: bool) -> bool:
        """Return whether something holds on every rank."""
        return bool(self.smallest(int(here)))
