"""The ledger: sums, peaks, refusals and their words."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.byte_sizes import GIB, MIB
from infinity.errors import IllegalTransition, OverBudget
from infinity.memory.ledger import Ledger, LedgerLine
from infinity.states import Tier

OWNERS = ("weights", "tiles", "activations")
moves = st.lists(
    st.tuples(
        st.sampled_from(["take", "give", "observe"]),
        st.sampled_from([Tier.CPU, Tier.GPU]),
        st.sampled_from(OWNERS),
        st.integers(min_value=0, max_value=100),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(moves, st.integers(min_value=0, max_value=200))
def test_used_is_the_sum_of_takes_minus_gives_and_peak_its_maximum(steps: list, budget: int) -> None:
    """Whatever is taken, given, observed or refused, used and peak equal a plain count, and takes never pass the budget."""
    ledger = Ledger({Tier.CPU: budget})
    held: dict = {}
    peaks: dict = {}
    tier_peaks = dict.fromkeys(Tier, 0)
    for kind, tier, owner, size in steps:
        before = held.get((tier, owner), 0)
        total = sum(amount for (where, _), amount in held.items() if where is tier)
        if kind == "take":
            if tier is Tier.CPU and total + size > budget:
                with pytest.raises(OverBudget):
                    ledger.take(tier, owner, size)
                continue
            ledger.take(tier, owner, size)
            held[tier, owner] = before + size
        elif kind == "give":
            if size > before:
                with pytest.raises(IllegalTransition):
                    ledger.give(tier, owner, size)
                continue
            ledger.give(tier, owner, size)
            held[tier, owner] = before - size
        else:
            over = ledger.observe(tier, owner, size)
            held[tier, owner] = size
            assert over == (max(0, total - before + size - budget) if tier is Tier.CPU else 0)
        peaks[tier, owner] = max(peaks.get((tier, owner), 0), held[tier, owner])
        total = sum(amount for (where, _), amount in held.items() if where is tier)
        tier_peaks[tier] = max(tier_peaks[tier], total)
        assert ledger.used(tier) == total
        assert ledger.peak(tier) == tier_peaks[tier]
    assert {(line.tier, line.owner): (line.used_bytes, line.peak_bytes) for line in ledger.report()} == {
        key: (held[key], peaks[key]) for key in held
    }


def test_a_refusal_names_tier_asked_used_budget_holders_and_a_remedy() -> None:
    """OverBudget says everything that is needed to act on it, and books nothing."""
    ledger = Ledger({Tier.CPU: 4 * GIB})
    ledger.take(Tier.CPU, "weights", 1 * GIB)
    ledger.take(Tier.CPU, "tile slots", 2 * GIB)
    ledger.take(Tier.GPU, "elsewhere", 9 * GIB)
    with pytest.raises(OverBudget) as caught:
        ledger.take(Tier.CPU, "gradients", 1 * GIB + MIB)
    text = caught.value.message
    for fact in ("cpu memory", "gradients", "1.00 GiB", str(GIB + MIB), "3.00 GiB", "4.00 GiB"):
        assert fact in text
    assert text.index("tile slots 2.00 GiB") < text.index("weights 1.00 GiB")
    assert "elsewhere" not in text
    assert "1.00 MiB" in caught.value.remedy
    assert ledger.used(Tier.CPU) == 3 * GIB
    ledger.take(Tier.CPU, "gradients", 1 * GIB)
    assert ledger.used(Tier.CPU) == ledger.budget(Tier.CPU) == ledger.peak(Tier.CPU)


def test_observed_memory_leaves_less_room_for_takes() -> None:
    """What was measured is never refused, says by how much it is over, and blocks later takes."""
    ledger = Ledger({Tier.CPU: 100})
    ledger.take(Tier.CPU, "tiles", 60)
    assert ledger.observe(Tier.CPU, "activations", 40) == 0
    assert ledger.observe(Tier.CPU, "activations", 45) == 5
    with pytest.raises(OverBudget):
        ledger.take(Tier.CPU, "tiles", 1)
    assert ledger.observe(Tier.CPU, "activations", 10) == 0
    ledger.take(Tier.CPU, "tiles", 30)
    assert ledger.peak(Tier.CPU) == 105


def test_tiers_without_a_budget_are_counted_only() -> None:
    """None and an absent tier both mean no limit."""
    ledger = Ledger({Tier.GPU: None})
    ledger.take(Tier.GPU, "weights", 10**15)
    ledger.take(Tier.CPU, "weights", 10**15)
    assert ledger.budget(Tier.GPU) is ledger.budget(Tier.CPU) is None
    assert ledger.report() == (
        LedgerLine(Tier.GPU, "weights", 10**15, 10**15),
        LedgerLine(Tier.CPU, "weights", 10**15, 10**15),
    )


@pytest.mark.parametrize("call", ["take", "give", "observe"])
def test_negative_sizes_are_refused(call: str) -> None:
    """A negative size is a bug of the caller, not a way to give back."""
    with pytest.raises(IllegalTransition, match="-1 bytes"):
        getattr(Ledger({}), call)(Tier.CPU, "weights", -1)


def test_threads_together_never_pass_the_budget() -> None:
    """Of many threads that ask for more than there is exactly as many are served as fit, and the books balance."""
    ledger = Ledger({Tier.CPU: 50})
    served: list[int] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        for _ in range(200):
            try:
                ledger.take(Tier.CPU, "slots", 10)
            except OverBudget:
                continue
            served.append(ledger.used(Tier.CPU))
            ledger.give(Tier.CPU, "slots", 10)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(served) <= 50
    assert ledger.peak(Tier.CPU) <= 50
    assert ledger.used(Tier.CPU) == 0
