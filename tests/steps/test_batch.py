"""Tokens, samples and signatures of a batch."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.steps.batch import (
    BatchCounts,
    batch_counts,
    batch_signature,
    call_tokens_function,
    has_tensors,
    resolve_tokens_function,
)


def _ids(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def _padded_batch() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 4:] = 0  # row sums 8 and 4
    labels = torch.where(mask.bool(), 1, -100)
    labels[0, :6] = -100  # six of the twelve real tokens are a prompt
    return {"input_ids": _ids(2, 8), "attention_mask": mask, "labels": labels}


def test_padding_and_ignored_labels_are_told_from_computed_tokens() -> None:
    counts = batch_counts(_padded_batch())
    assert counts == BatchCounts(tokens=2 * 8, tokens_not_padding=8 + 4, tokens_in_loss=12 - 6, samples=2)


def test_shapes_alone_give_tokens_without_reading_contents() -> None:
    counts = batch_counts(_padded_batch(), read_contents=False)
    assert counts == BatchCounts(tokens=16, samples=2)


def test_contents_of_a_tensor_that_is_not_on_the_cpu_are_never_read() -> None:
    batch = {name: tensor.to("meta") for name, tensor in _padded_batch().items()}
    # A meta tensor has no contents: reading any would raise.
    assert batch_counts(batch) == BatchCounts(tokens=16, samples=2)


@dataclass
class _Batch:
    input_ids: torch.Tensor
    name: str = "x"


_Pair = namedtuple("_Pair", ["inputs", "targets"])


@pytest.mark.parametrize(
    ("batch", "tokens", "samples"),
    [
        (_ids(3, 5), 15, 3),
        (_ids(3, 5, dtype=torch.int32), 15, 3),
        ((_ids(3, 5), _ids(3, 5)), 15, 3),
        ([_ids(3, 5), torch.zeros(3)], 15, 3),
        ({"x": _ids(3, 5), "y": _ids(3)}, 15, 3),
        (({"input_ids": _ids(3, 5)}, _ids(3)), 15, 3),
        (UserDict(input_ids=_ids(3, 5)), 15, 3),
        (_Batch(_ids(3, 5)), 15, 3),
        (_Pair(_ids(3, 5), _ids(3)), 15, 3),
        ({"input_ids": _ids(3, 4, 5)}, 60, 3),  # multiple choice
        ({"input_ids": _ids(60)}, 60, None),  # documents packed into one row
        ({"inputs_embeds": torch.zeros(3, 5, 7)}, 15, 3),
        (torch.zeros(4, 3, 8, 8), None, 4),
        ((torch.zeros(4, 3, 8, 8), _ids(4)), None, 4),
        ((torch.zeros(4, 3, 8, 8), _ids(4, 80)), None, 4),  # multi-label targets are not text
        (torch.zeros(3, 5), None, 3),
        (torch.zeros(3, 5, dtype=torch.bool), None, 3),
        (["a", "b"], None, 2),
        (torch.tensor(1.0), None, None),
        (None, None, None),
        (7, None, None),
        ({}, None, None),
        ([], None, None),
    ],
)
def test_tokens_and_samples_follow_from_the_batch(batch: Any, tokens: int | None, samples: int | None) -> None:
    counts = batch_counts(batch, read_contents=False)
    assert (counts.tokens, counts.samples) == (tokens, samples)


def test_nested_input_ids_count_real_tokens_only() -> None:
    ids = torch.nested.nested_tensor([_ids(3), _ids(5)], layout=torch.jagged)
    assert batch_counts({"input_ids": ids}) == BatchCounts(tokens=3 + 5, samples=2)


def test_hugging_face_encodings_are_read() -> None:
    transformers = pytest.importorskip("transformers")
    counts = batch_counts(transformers.BatchEncoding(_padded_batch()))
    assert (counts.tokens, counts.tokens_not_padding, counts.tokens_in_loss) == (16, 12, 6)


def test_a_mask_of_another_shape_is_not_taken_for_padding() -> None:
    batch = {"input_ids": _ids(2, 8), "attention_mask": torch.ones(2, 1, 8, 8)}
    assert batch_counts(batch).tokens_not_padding is None


class TestSignature:
    """Equal for equal work, different for different work."""

    def test_contents_do_not_matter(self) -> None:
        assert batch_signature({"a": torch.zeros(2, 3)}) == batch_signature({"a": torch.ones(2, 3)})

    @pytest.mark.parametrize(
        "other",
        [
            {"a": torch.zeros(2, 4)},
            {"a": torch.zeros(2, 3, dtype=torch.bfloat16)},
            {"a": torch.zeros(2, 3, requires_grad=True)},
            {"b": torch.zeros(2, 3)},
            {"a": [torch.zeros(2, 3)]},
            {"a": torch.zeros(2, 3), "b": torch.zeros(1)},
            {"a": None},
        ],
    )
    def test_shape_dtype_gradient_and_structure_matter(self, other: Any) -> None:
        assert batch_signature({"a": torch.zeros(2, 3)}) != batch_signature(other)

    def test_a_running_number_or_a_text_does_not_make_a_step_look_new(self) -> None:
        first, second = ({"x": torch.zeros(2), "index": i, "path": f"{i}.png", "name": None} for i in (1, 2))
        assert batch_signature(first) == batch_signature(second)

    @pytest.mark.parametrize(
        "batch",
        [
            {"a": {"b": [torch.zeros(1), (torch.zeros(2), None)]}},
            UserDict(a=torch.zeros(2)),
            _Batch(_ids(2, 3)),
            _Pair(_ids(2, 3), "x"),
            torch.nested.nested_tensor([_ids(3), _ids(5)], layout=torch.jagged),
            torch.nested.nested_tensor([torch.zeros(3), torch.zeros(5)], layout=torch.strided),
            torch.zeros(2, 3).to_sparse(),
            ["x"] * 1000,
            object(),
            None,
        ],
    )
    def test_every_usual_batch_has_a_hashable_signature(self, batch: Any) -> None:
        assert hash(batch_signature(batch)) == hash(batch_signature(batch))

    def test_document_lengths_of_a_nested_batch_matter(self) -> None:
        nested = [torch.nested.nested_tensor([_ids(3), _ids(n)], layout=torch.jagged) for n in (5, 6)]
        assert batch_signature(nested[0]) != batch_signature(nested[1])

    def test_a_batch_that_contains_itself_ends(self) -> None:
        batch: list[Any] = [torch.zeros(1)]
        batch.append(batch)
        hash(batch_signature(batch))

    def test_arrays_of_other_libraries_count_by_shape(self) -> None:
        numpy = pytest.importorskip("numpy")
        assert batch_signature(numpy.zeros((2, 3))) != batch_signature(numpy.zeros((2, 4)))


def count_rows(batch: torch.Tensor) -> int:
    return int(batch.shape[0])


class TestTokensFunction:
    """A user's function: by value or by import path, its answer checked."""

    @pytest.mark.parametrize("spec", ["operator:length_hint", "operator.length_hint", "builtins:list.__len__"])
    def test_import_paths_with_colon_or_dot_are_resolved(self, spec: str) -> None:
        function = resolve_tokens_function(spec)
        assert function is not None
        assert function([1, 2, 3]) == 3

    @pytest.mark.parametrize("spec", ["no_such_module:f", "operator:no_such", "length_hint", "", 5, "math:pi", "os..x"])
    def test_what_cannot_be_called_is_refused_with_an_example(self, spec: Any) -> None:
        with pytest.raises(
            ConfigurationError, match=r"tokens=.*is not allowed.*example: tokens='my_project.data:count"
        ):
            resolve_tokens_function(spec)

    def test_its_number_is_used_beside_the_samples(self) -> None:
        assert call_tokens_function(count_rows, torch.zeros(4, 2)) == BatchCounts(tokens=4, samples=4)

    def test_it_may_answer_in_full(self) -> None:
        counts = BatchCounts(tokens=5, samples=1)
        assert call_tokens_function(lambda _: counts, None) is counts

    @pytest.mark.parametrize("answer", [None, "12", 1.5, True, torch.tensor(2.5)])
    def test_rubbish_is_named(self, answer: Any) -> None:
        with pytest.raises(TypeError, match=r"tokens function .* returned .*expected an int"):
            call_tokens_function(lambda _: answer, None)

    def test_a_negative_number_is_refused(self) -> None:
        with pytest.raises(ValueError, match="returned -1; expected a number of tokens, 0 or more"):
            call_tokens_function(lambda _: -1, None)

    def test_a_tensor_of_a_device_is_refused_rather_than_waited_for(self) -> None:
        with pytest.raises(TypeError, match="would make training wait"):
            call_tokens_function(lambda _: torch.zeros((), device="meta"), None)

    def test_a_number_of_numpy_or_of_the_cpu_is_taken(self) -> None:
        assert call_tokens_function(lambda _: torch.tensor(3), None).tokens == 3


@pytest.mark.parametrize(("batch", "expected"), [(None, False), ("text", False), ({"x": [1, 2]}, False)])
def test_a_batch_without_a_tensor_says_nothing_of_the_work(batch: Any, expected: bool) -> None:
    assert has_tensors(batch) is expected
    assert has_tensors([batch, torch.ones(2)])
