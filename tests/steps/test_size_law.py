"""The law that FLOPs follow over the sizes of a batch: found exactly, or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from mfu_monitor.counting.step_record import FlopTotals, OpRecord, Phase, StepRecord
from mfu_monitor.steps.batch import batch_signature
from mfu_monitor.steps.size_law import MOST_POINTS, SizeLaw, split_sizes

Sizes = tuple[int, ...]


def a_record(**flops_by_module: int) -> StepRecord:
    return StepRecord(
        ops=tuple(
            OpRecord(
                op="aten::mm",
                phase=Phase.FORWARD,
                module_fqn=name,
                precision="bf16",
                totals=FlopTotals(model_flops=flops, palm_model_flops=flops),
            )
            for name, flops in flops_by_module.items()
        )
    )


def taught(truth: Callable[..., dict[str, int]], counted: list[Sizes], *, is_drawn: bool = False) -> SizeLaw:
    law = SizeLaw()
    for sizes in counted:
        law.add(sizes, a_record(**truth(*sizes)), is_drawn=is_drawn)
    return law


def causal(B: int, S: int) -> dict[str, int]:
    return {"linear": 6 * B * S * 12 * 32**2, "attention": 12 * B * 32 * (S * (S + 1) // 2), "update": 4096}


def patches(B: int, H: int) -> dict[str, int]:
    n = (H // 16) ** 2 + 1
    return {"embed": B * (n - 1) * 768, "linear": B * n * 512, "attention": 4 * B * n * n * 32}


def oblong(B: int, H: int, W: int) -> dict[str, int]:
    n = (H // 16) * (W // 16) + 1
    return {"linear": B * n * 512, "attention": 4 * B * n * n * 32, "convolution": B * H * W * 27}


def two_lengths(B: int, S: int, T: int) -> dict[str, int]:
    return {"encoder": B * S * 96 + 0 * T, "self": B * S * S * 8, "cross": 4 * B * S * T * 32, "decoder": B * T * T * 8}


def contrastive(B: int, S: int) -> dict[str, int]:
    return {"towers": B * S * 640, "logits": 2 * B * B * 64}


def shifted(B: int, S: int) -> dict[str, int]:
    return {"backbone": B * S * 640, "head": 6 * B * (S - 1) * 64 * 32}


SIZES = {
    causal: [(3, 17), (1, 90), (8, 33), (5, 64), (2, 128), (8, 8), (1, 8), (8, 128)],
    patches: [(4, 224), (2, 160), (8, 96), (1, 320), (4, 256), (3, 128), (1, 96), (8, 320)],
    oblong: [(4, 224, 160), (2, 160, 320), (8, 96, 96), (1, 320, 128), (4, 256, 64), (3, 128, 224), (1, 64, 32)],
    two_lengths: [(4, 20, 7), (2, 33, 12), (7, 9, 31), (1, 50, 22), (5, 41, 18), (3, 27, 25), (6, 12, 40)],
    contrastive: [(4, 20), (7, 33), (2, 9), (8, 50), (3, 41), (5, 27)],
    shifted: [(4, 20), (7, 33), (2, 9), (8, 50), (3, 41), (5, 27)],
}


@pytest.mark.parametrize("truth", SIZES, ids=lambda truth: truth.__name__)
def test_after_eight_counts_it_gives_every_size_in_between_to_the_flop(truth: Callable[..., dict[str, int]]) -> None:
    law = taught(truth, SIZES[truth])
    assert law.is_trusted
    ranges = [sorted(set(column)) for column in zip(*SIZES[truth], strict=True)]
    for sizes in itertools.product(*ranges):
        amounts = law.amounts(sizes)
        assert amounts is not None
        expected = sum(truth(*sizes).values())
        assert amounts["model_flops", ""] == amounts["model_flops_by_precision", "bf16"] == expected
        assert amounts["recompute_flops", ""] == 0


def test_it_is_exact_only_after_a_count_drawn_at_random_confirmed_it() -> None:
    law = taught(causal, SIZES[causal])
    assert (law.label((4, 60)), law.equal_counts((4, 60))) == ("presumed", 2)
    law.add((4, 61), a_record(**causal(4, 61)), is_drawn=True)
    assert (law.label((4, 60)), law.equal_counts((4, 60))) == ("exact", 3)


def test_before_two_counts_were_predicted_it_says_nothing() -> None:
    law = taught(causal, SIZES[causal][:4])
    assert (law.amounts((4, 60)), law.label((4, 60)), law.equal_counts((4, 60))) == (None, "sampled", 0)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((4, 129), "longer than all that were counted: a sliding window may begin there"),
        ((4, 7), "shorter than all that were counted"),
        ((9, 64), "a larger batch"),
    ],
)
def test_outside_the_counted_sizes_it_only_presumes(sizes: Sizes, why: str) -> None:
    law = taught(causal, [*SIZES[causal], (4, 60)], is_drawn=True)
    assert law.label((4, 61)) == "exact"
    assert (law.label(sizes), law.equal_counts(sizes)) == ("presumed", 0), why
    law.add(sizes, a_record(**causal(*sizes)), is_drawn=False)
    assert law.label(sizes) == "exact"


def test_sizes_out_of_step_with_the_counted_ones_are_not_known() -> None:
    law = taught(patches, SIZES[patches], is_drawn=True)
    assert law.label((4, 192)) == "exact"
    assert law.label((4, 200)) == "presumed"
    law.add((4, 200), a_record(**patches(4, 200)), is_drawn=False)  # 12.5 patches, cut to 12
    assert law.is_ended
    assert law.label((4, 192)) == "sampled"


def window_of_64(B: int, S: int) -> dict[str, int]:
    return {"linear": B * S * 640, "attention": B * sum(min(i + 1, 64) for i in range(S))}


def padded_to_64(B: int, S: int) -> dict[str, int]:
    return {"linear": B * S * 640, "attention": B * (-(-S // 64) * 64) ** 2}


def capacity(B: int, S: int) -> dict[str, int]:
    return {"linear": B * S * 640, "experts": 8 * max(4, -(-B * S * 5 // (4 * 8))) * 96}


def halved_up(B: int, S: int) -> dict[str, int]:
    return {"convolution": B * ((S + 1) // 2) * 96}


@pytest.mark.parametrize("truth", [window_of_64, padded_to_64, capacity, halved_up], ids=lambda truth: truth.__name__)
def test_what_is_no_polynomial_of_the_sizes_is_never_called_exact_and_wrong(
    truth: Callable[..., dict[str, int]],
) -> None:
    law = taught(truth, [(3, 17), (1, 90), (8, 33), (5, 64), (2, 128), (8, 8), (1, 8), (8, 127)], is_drawn=True)
    assert len(SIZES[causal]) == MOST_POINTS
    assert law.is_ended
    assert law.amounts((4, 60)) is None


def test_a_window_that_begins_above_the_counted_lengths_ends_the_law() -> None:
    short = [(3, 17), (1, 60), (8, 33), (5, 64), (2, 50), (8, 8), (1, 8), (8, 64)]
    law = taught(window_of_64, short, is_drawn=True)
    assert law.label((4, 40)) == "exact"
    assert law.label((4, 65)) == "presumed"
    law.add((4, 65), a_record(**window_of_64(4, 65)), is_drawn=False)
    assert law.is_ended


def test_a_size_that_never_varied_is_not_guessed() -> None:
    law = taught(causal, [(4, 17), (4, 90), (4, 33), (4, 64), (4, 128), (4, 8)], is_drawn=True)
    assert law.label((4, 100)) == "exact"
    assert (law.label((3, 100)), law.amounts((3, 100))) == ("sampled", None)  # the last short batch
    law.add((3, 100), a_record(**causal(3, 100)), is_drawn=False)
    assert law.label((4, 100)) == "exact"


def test_sizes_that_were_always_equal_are_not_told_apart() -> None:
    def square(H: int, W: int) -> dict[str, int]:
        return {"convolution": 54 * H * W}

    law = taught(square, [(h, h) for h in (32, 64, 96, 160, 224)], is_drawn=True)
    assert law.amounts((128, 128)) == {**dict(law.amounts((96, 96)) or {}), **_all(54 * 128 * 128)}
    assert law.amounts((128, 96)) is None


def _all(flops: int) -> dict[tuple[str, str], int]:
    names = [("model_flops", ""), ("palm_model_flops", "")]
    names += [("model_flops_by_precision", "bf16"), ("hardware_flops_by_precision", "bf16")]
    return dict.fromkeys(names, flops)


def test_counts_of_equal_sizes_that_differ_end_it() -> None:
    law = taught(causal, SIZES[causal][:2])
    law.add(SIZES[causal][0], a_record(linear=1), is_drawn=False)
    assert law.is_ended


def test_a_wrong_prediction_ends_a_law_that_was_trusted() -> None:
    law = taught(causal, SIZES[causal])
    law.add((4, 60), a_record(**{**causal(4, 60), "update": 4097}), is_drawn=True)
    assert law.is_ended
    for sizes in SIZES[causal]:
        law.add(sizes, a_record(**causal(*sizes)), is_drawn=True)
    assert law.label((4, 60)) == "sampled"


def test_a_row_that_is_there_at_some_sizes_only_is_no_law() -> None:
    def sometimes(B: int, S: int) -> dict[str, int]:
        return {**causal(B, S), **({"long": B * S} if S > 40 else {})}

    assert taught(sometimes, SIZES[causal]).is_ended


def test_an_empty_batch_teaches_nothing() -> None:
    law = taught(causal, SIZES[causal])
    law.add((0, 64), a_record(**causal(0, 64)), is_drawn=True)
    assert not law.is_ended
    assert law.label((0, 64)) == "presumed"


def test_sizes_leave_a_signature_and_the_rest_of_it_stays() -> None:
    def kind(batch: object) -> object:
        return split_sizes(batch_signature(batch))[0]

    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "scale": torch.zeros(()), "labels": torch.zeros(2)}
    other = {"input_ids": torch.zeros(3, 9, dtype=torch.long), "scale": torch.zeros(()), "labels": torch.zeros(3)}
    assert split_sizes(batch_signature(batch))[1:] == ((2, 8, 2), 2 * 8 + 1 + 2)
    assert kind(batch) == kind(other)
    assert kind(batch) != kind({**batch, "labels": torch.zeros(2, 1)})
    assert kind(batch) != kind({**batch, "labels": torch.zeros(2, dtype=torch.half)})
    assert kind([torch.zeros(2)]) != kind([torch.zeros(2), torch.zeros(2)])


def test_packed_documents_keep_their_sizes_in_the_kind() -> None:
    def packed(*lengths: int) -> object:
        parts = [torch.zeros(n, 4) for n in lengths]
        return split_sizes(batch_signature(torch.nested.nested_tensor(parts, layout=torch.jagged)))

    assert packed(2, 3) != packed(2, 4)
    assert packed(2, 3)[1] == ()  # type: ignore[index]
