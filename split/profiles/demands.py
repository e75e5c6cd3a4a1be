"""What a contract asks of every cut: the workbench looks for candidates by it, and a card is known by it to have been
made for this contract.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from split.profiles.contract import Contract


class ContractDemands(msgspec.Struct, frozen=True, kw_only=True):
    memory_bytes: int | None = None
    """`resource.memory_bytes`: most bytes of weights in a head."""
    depth_min_ratio: float = 0.0
    """`data.depth_min_ratio`."""
    private: tuple[str, ...] = ()
    """Inputs that must not be readable off what crosses; sorted."""

    def __str__(self) -> str:
        """For the card: "" where nothing is asked."""
        return "" if self == NOTHING_ASKED else msgspec.json.encode(self).decode()

    def said(self) -> str:
        """What is asked of every cut, as a clause; "" where nothing is."""
        asked = []
        if self.memory_bytes is not None:
            asked.append(f"at most {self.memory_bytes:,} bytes of weights in the head (resource.memory_bytes)")
        if self.depth_min_ratio > 0.0:
            asked.append(
                f"at least {100 * self.depth_min_ratio:.4g} % of the compute in the head (data.depth_min_ratio)"
            )
        if self.private:
            asked.append(f"nothing that shows {', '.join(self.private)} in what crosses (privacy)")
        return " and ".join(asked)


NOTHING_ASKED: Final = ContractDemands()


def demands_of(contract: Contract | None, inputs: Iterable[str]) -> ContractDemands:
    """`inputs`: names of the model's inputs."""
    if contract is None:
        return NOTHING_ASKED
    named = {spec.name for spec in contract.data.inputs if spec.privacy != "any"}
    private = [name for name in inputs if name in named or contract.data.privacy != "any"]
    return ContractDemands(
        memory_bytes=contract.resource.memory_bytes,
        depth_min_ratio=contract.data.depth_min_ratio,
        private=tuple(sorted(private)),
    )
