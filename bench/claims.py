"""A claim: a measured value beside the most that was promised."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from provenance import markdown_table


@dataclass(frozen=True)
class Claim:
    """`measured` must not exceed `limit`; both are in `unit`."""

    what: str
    measured: float
    limit: float
    unit: str

    @property
    def met(self) -> bool:
        return self.measured <= self.limit


def as_json(claims: list[Claim]) -> list[dict[str, Any]]:
    """Return the claims with their verdicts as plain values."""
    return [{**asdict(claim), "met": claim.met} for claim in claims]


def claims_table(claims: list[Claim]) -> str:
    """Return the claims as a Markdown table."""
    return markdown_table(
        ["claim", "measured", "at most", "unit", "met"],
        [
            [claim.what, f"{claim.measured:.3f}", f"{claim.limit:.3f}", claim.unit, "yes" if claim.met else "no"]
            for claim in claims
        ],
    )
