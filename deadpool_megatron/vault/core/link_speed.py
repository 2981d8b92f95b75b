"""How fast the link is of which copies may take a share, and how that is known. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Origin(StrEnum):
    """How the speed of a link is known."""

    CHECK = "the check of links"
    INTERFACE = "the network interface"
    SEEN = "the most that was seen on it"


@dataclass(frozen=True)
class LinkSpeed:
    """Of a node's link in one direction."""

    bytes_per_second: float
    origin: Origin

    def to_dict(self) -> dict[str, Any]:
        """JSON form, as in the vault's status."""
        return {"bytes_per_second": self.bytes_per_second, "origin": self.origin}


def link_speed(checked: float, stated: float, seen: float) -> LinkSpeed | None:
    """Returns the best that is known of a link; None while nothing is.

    All in bytes per second, 0 for what is not known. ``checked``: what the check of links brought
    over. ``stated``: what the interface says, which may be more than the network behind it carries.
    ``seen``: what a shipment had that nothing held back, or the interface has sent in a moment,
    which may be less than the link has.
    """
    known = ((checked, Origin.CHECK), (stated, Origin.INTERFACE), (seen, Origin.SEEN))
    return next((LinkSpeed(speed, origin) for speed, origin in known if speed > 0), None)
