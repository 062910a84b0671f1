"""The one exchange of a step: every rank sees the same norm, touched parameters, losses, and order of reductions."""

import math

import pytest
from rank_threads import on_every_rank, ranks

from infinity.comm.local import Local
from infinity.engine.agreement import AgreedFacts, Agreement
from infinity.engine.waiting_gradients import GradientFacts
from infinity.errors import ConfigError, ModelError
from infinity.store.layout import ParameterSpec
from infinity.store.unit_size import unit_layouts
from infinity.zero.turns import Turns

NAMES = (("0.a", "0.b"), ("1.a", "1.b"))
LAYOUTS = [
    unit_layouts(
        index,
        f"unit{index}",
        [ParameterSpec(name, (3,), "float32", True) for name in names],
        tile_elements=64,
        stage=1,
        num_ranks=2,
    )
    for index, names in enumerate(NAMES)
]


def facts(sums: tuple[float, ...], touched: dict[int, frozenset[str]], bad: str | None = None) -> GradientFacts:
    return GradientFacts(sums, touched, bad)


def test_ranks_are_put_together_in_their_order() -> None:
    """Sums of squares by rank, any rank's touched parameters, the first rank's bad one, all losses, one mean (C73)."""
    mine = [
        (facts((0.1, 2.0), {0: frozenset({"0.a"})}), [3.0, 1.0], [0.25, 0.25]),
        (facts((1e-300, math.inf), {0: frozenset({"0.b"}), 1: frozenset({"1.b"})}, "1.b"), [7.0], [0.5]),
    ]
    orders = [(1, 0), (0, 1)]
    with ranks(2) as groups:

        def job(rank: int) -> tuple[AgreedFacts, list[int]]:
            turns = Turns([0, 1])
            for shard in orders[rank]:
                list(turns.ready(shard))
            list(turns.rest())
            turns.begin()
            agreed = Agreement(groups[rank], LAYOUTS, turns).step(*mine[rank], {"lr": 0.1})
            return agreed, list(turns.rest())

        results = on_every_rank(2, job)
    for result in results:
        assert not isinstance(result, BaseException), result
        agreed, order = result
        assert agreed.gradients.sums_of_squares == (0.1, 2.0, 1e-300, math.inf)
        assert agreed.gradients.touched == {0: frozenset({"0.a", "0.b"}), 1: frozenset({"1.b"})}
        assert agreed.gradients.first_not_finite == "1.b"
        assert (agreed.losses, agreed.loss) == ((3.0, 1.0, 7.0), 3.0 / 4 + 1.0 / 4 + 7.0 / 2)
        assert order == [1, 0]  # rank 0's


def test_shares_that_are_no_mean_are_an_error_on_every_rank() -> None:
    """Two micro-batches on one rank and one on the other, each weighted as if all had as many: nobody takes the step."""
    with ranks(2) as groups:
        shares = [[0.25, 0.25], [0.5, 0.5]]
        results = on_every_rank(
            2, lambda rank: Agreement(groups[rank], LAYOUTS, None).step(facts((), {}), [1.0, 1.0], shares[rank], {})
        )
    assert all(isinstance(result, ModelError) and "add up to 1.5" in str(result) for result in results)


def test_a_setting_that_ranks_have_differently_is_an_error_on_every_rank() -> None:
    """A scheduler that one rank fed with its own loss, another clipping: weights would drift apart without a word."""
    with ranks(2) as groups:
        settings = [{"lr": 0.1, "betas": [0.9, 0.95]}, {"lr": 0.1, "betas": [0.9, 0.999]}]
        results = on_every_rank(
            2, lambda rank: Agreement(groups[rank], LAYOUTS, None).step(facts((), {}), [], [], settings[rank])
        )
    assert all(isinstance(result, ConfigError) for result in results)
    assert {str(result).split("\n")[0] for result in results} == {str(results[0]).split("\n")[0]}
    assert "betas is [0.9, 0.95] on rank 0 and [0.9, 0.999] on rank 1" in str(results[0])


@pytest.mark.parametrize("losses", [(), (2.0, 4.0)])
def test_one_rank_agrees_with_itself(losses: tuple[float, ...]) -> None:
    """Everything is as it was; the familiar loop gives no losses."""
    own = facts((0.5, 0.25), {1: frozenset({"1.a"})})
    agreed = Agreement(Local(), LAYOUTS, None).step(own, losses, [1 / len(losses)] * len(losses) if losses else [], {})
    assert agreed.gradients == own
    assert agreed.loss == (3.0 if losses else 0.0)
