"""Which work ranks share: comparisons of what they took, pure, with sections as they travel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mfu_monitor.counting.fingerprints import Print, StepPrints
from mfu_monitor.counting.step_record import FlopTotals, OpRecord, Phase, StepRecord
from mfu_monitor.steps.repeats import DOUBT, RankPrints, RepeatedWork, Share, Verdict, find_shares

Work = dict[tuple[str, Phase], tuple[int, int] | None]
"""First operand and the others, by module and phase; None for what was not seen."""


def step_prints(work: Work, *, is_flat: bool = False) -> StepPrints:
    calls, prints = {}, []
    for (module, phase), operands in work.items():
        place = ("aten::mm", phase, module, "fp32", ((4, 4), (4, 4)))
        calls[place] = [None if operands is None else len(prints)]
        if operands is not None:
            prints.append(Print(*operands, is_flat))
    return StepPrints(calls, lambda: prints)


def rank_prints(work: Work, *, batch: int = 0, is_flat: bool = False) -> RankPrints:
    units = step_prints(work, is_flat=is_flat).units()
    assert units is not None
    return RankPrints.of(batch, [word for unit in units.values() for word in unit])


def shares(ranks: list[RankPrints], rank: int = 0) -> list[Verdict]:
    return list(find_shares(ranks, rank).values())


FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


def test_equal_work_on_several_ranks_is_shared_and_the_parts_add_up() -> None:
    ranks = [rank_prints({("a", FORWARD): (1, 2)}) for _ in range(3)]
    assert [shares(ranks, rank) for rank in range(3)] == [[Share(3, 0)], [Share(3, 1)], [Share(3, 2)]]
    assert [Share(3, place).of(101) for place in range(3)] == [34, 34, 33]
    assert Share(0, 0).of(101) == 0


@pytest.mark.parametrize("theirs", [(9, 2), (1, 9)], ids=["data parallel", "tensor parallel"])
def test_other_data_or_other_weights_are_work_of_ones_own(theirs: tuple[int, int]) -> None:
    ranks = [rank_prints({("a", FORWARD): work}, batch=batch) for work, batch in (((1, 2), 5), (theirs, 6))]
    assert shares(ranks) == [Share(1, 0)]


def test_the_same_work_in_another_module_is_not_the_same_piece() -> None:
    ranks = [rank_prints({(module, FORWARD): (1, 2)}) for module in ("a", "b")]
    assert shares(ranks) == [Share(1, 0)]


def test_equal_operands_of_one_value_prove_nothing_and_different_ones_do() -> None:
    flat = rank_prints({("a", FORWARD): (1, 2)}, is_flat=True)
    assert shares([flat, flat]) == [None]
    assert shares([flat, rank_prints({("a", FORWARD): (3, 4)})]) == [Share(1, 0)]


def test_what_was_not_seen_is_not_known() -> None:
    assert shares([rank_prints({("a", FORWARD): None}), rank_prints({("a", FORWARD): (1, 2)})]) == [None]


def test_one_batch_and_other_activations_at_equal_weights_leave_all_unknown() -> None:
    """Dropout drawn by each rank makes repeated work look like two pieces; so does a batch split within the step."""
    noisy = [rank_prints({("a", FORWARD): (1, 2), ("b", FORWARD): (x, 4)}, batch=7) for x in (5, 6)]
    assert shares(noisy) == [DOUBT, DOUBT]
    # With batches of their own the ranks are data parallel, though one module of theirs takes no data.
    apart = [rank_prints({("a", FORWARD): (1, 2), ("b", FORWARD): (x, 4)}, batch=x) for x in (5, 6)]
    assert shares(apart) == [Share(2, 0), Share(1, 0)]


def test_a_forward_that_is_repeated_with_a_backward_that_is_not_is_unknown() -> None:
    ranks = [rank_prints({("a", FORWARD): (1, 2), ("a", BACKWARD): (x, 1), ("b", FORWARD): (3, x)}) for x in (5, 6)]
    assert shares(ranks) == [DOUBT, DOUBT, Share(1, 0)]


class TestExchange:
    """Sections of 4 KB travel with windows; what all sent of one step is compared."""

    def world(self, works: list[Work], batches: list[int | None], step: int = 0) -> list[RepeatedWork]:
        ranks = [RepeatedWork() for _ in works]
        for rank, repeats in enumerate(ranks):
            repeats.join(rank=rank)
        self.count(ranks, works, batches, step)
        return ranks

    def count(self, ranks: list[RepeatedWork], works: list[Work], batches: list[int | None], step: int) -> None:
        for repeats, work, batch in zip(ranks, works, batches, strict=True):
            repeats.add(step, step_prints(work), None if batch is None else lambda b=batch: b, has_batch=True)

    def exchange(self, ranks: list[RepeatedWork]) -> list[bool]:
        sections = [repeats.section() for repeats in ranks]
        assert all(len(section) <= 512 for section in sections)
        # As on the wire: of one length for all.
        return [repeats.take([[*s, *[0] * (512 - len(s))] for s in sections]) for repeats in ranks]

    def record(self, *modules: str) -> StepRecord:
        totals = FlopTotals(model_flops=101, palm_model_flops=201)
        shapes = ((4, 4), (4, 4))
        op = OpRecord(op="aten::mm", phase=FORWARD, precision="fp32", shapes=shapes, totals=totals)
        return StepRecord(ops=tuple(replace(op, module_fqn=module) for module in modules))

    def test_a_record_keeps_its_part_and_the_rest_is_other(self) -> None:
        works: list[Work] = [{("a", FORWARD): (1, 2), ("b", FORWARD): (3, x)} for x in (5, 6)]
        ranks = self.world(works, [4000, 4000])
        assert not ranks[0].applied(self.record("a", "b")).repeats_known
        assert self.exchange(ranks) == [True, True]
        records = [repeats.applied(self.record("a", "b")) for repeats in ranks]
        assert [r.model_flops for r in records] == [51 + 101, 50 + 101]
        assert [r.repeated_flops for r in records] == [50, 51] == [r.other_flops for r in records]
        assert sum(r.palm_model_flops for r in records) == 3 * 201
        assert [r.hardware_flops for r in records] == [202, 202]
        assert all(r.repeats_known for r in records)
        assert [repeats.batch for repeats in ranks] == [Share(2, 0), Share(2, 1)]
        assert [repeats.duplicates for repeats in ranks] == [(), ()]

    def test_nothing_is_learned_before_all_ranks_have_sent_all_of_one_step(self) -> None:
        many: Work = {(f"m{i}", FORWARD): (i, 1) for i in range(300)}
        ranks = self.world([many, {("a", FORWARD): (1, 2)}], [8, 12])
        assert self.exchange(ranks) == [False, False]  # 254 of 300 pairs fit beside the head
        assert self.exchange(ranks) == [True, True]
        assert ranks[0].applied(self.record("m299")).repeats_known

    def test_other_shapes_of_a_module_are_shared_alike(self) -> None:
        ranks = self.world([{("a", FORWARD): (1, 2)}] * 2, [8, 8])
        self.exchange(ranks)
        op = OpRecord(op="aten::mm", phase=FORWARD, module_fqn="a", precision="fp32", shapes=((8, 4), (4, 4)),
                      totals=FlopTotals(model_flops=10))  # fmt: skip
        assert [r.applied(StepRecord(ops=(op,))).model_flops for r in ranks] == [5, 5]
        elsewhere = StepRecord(ops=(OpRecord(op="aten::mm", phase=FORWARD, module_fqn="z", totals=op.totals),))
        assert not ranks[0].applied(elsewhere).repeats_known

    def test_two_steps_that_disagree_leave_it_unknown_for_good(self) -> None:
        ranks = self.world([{("a", FORWARD): (1, 2)}] * 2, [8, 8])
        self.exchange(ranks)
        self.count(ranks, [{("a", FORWARD): (x, 2)} for x in (5, 6)], [8, 12], step=1)
        self.exchange(ranks)
        assert not ranks[0].applied(self.record("a")).repeats_known
        assert ranks[0].batch_disagrees

    def test_a_doubt_stays_though_weights_drift_apart_and_later_steps_look_like_work_of_ones_own(self) -> None:
        ranks = self.world([{("a", FORWARD): (x, 2)} for x in (5, 6)], [8, 8])
        self.exchange(ranks)
        self.count(ranks, [{("a", FORWARD): (x, x)} for x in (5, 6)], [8, 8], step=1)
        self.exchange(ranks)
        assert not ranks[0].applied(self.record("a")).repeats_known

    def test_ranks_that_do_all_the_same_on_one_batch_are_duplicates(self) -> None:
        ranks = self.world([{("a", FORWARD): (1, 2)}] * 2 + [{("a", FORWARD): (3, 2)}], [8, 8, 12])
        self.exchange(ranks)
        assert [repeats.duplicates for repeats in ranks] == [(1,), (0,), ()]

    def test_a_stage_without_a_batch_has_no_tokens_of_its_own(self) -> None:
        ranks = self.world([{("a", FORWARD): (1, 2)}], [8])
        last = RepeatedWork()
        last.join(rank=1)
        last.add(0, step_prints({("b", FORWARD): (1, 2)}), None, has_batch=False)
        self.exchange([*ranks, last])
        assert [r.batch for r in (*ranks, last)] == [Share(1, 0), Share(0, 0)]

    def test_a_batch_that_cannot_be_read_leaves_batches_unknown(self) -> None:
        ranks = self.world([{("a", FORWARD): (1, 2)}, {("a", FORWARD): (3, 2)}], [8, None])
        self.exchange(ranks)
        assert ranks[0].batch is None
        assert ranks[0].applied(self.record("a")).repeats_known

    def test_prints_that_have_not_arrived_are_sent_later(self) -> None:
        repeats = RepeatedWork()
        repeats.join(rank=0)
        repeats.add(0, StepPrints({}, lambda: None), None, has_batch=False)
        assert repeats.section() == []

    def test_a_world_of_one_repeats_nothing(self) -> None:
        record = self.record("a")
        assert RepeatedWork().applied(record) is record
