from __future__ import annotations

import fcntl
import json
import logging
import multiprocessing
import pickle
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from drafter_trainer.dataset import DatasetWriter, TokenDataset, is_prepared, read_meta
from drafter_trainer.errors import UserError
from drafter_trainer.prepare import PrepareSettings, open_dataset
from drafter_trainer.tokenise import CHUNK_ROWS, RowTokenizer, tokenise_rows
from drafter_trainer.tokenizer import TokenizerFacts
from tests.support import tiny_tokenizer as tiny
from tests.support.tiny_tokenizer import conversations, write_jsonl, write_tiny_tokenizer

SETTINGS = PrepareSettings(max_length_tokens=64)


def one_turn(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture
def source(tmp_path):
    return write_jsonl(tmp_path / "rows.jsonl", conversations(20))


def opened(source, tokenizer, settings=SETTINGS, **more) -> TokenDataset:
    return open_dataset(source, tokenizer=tokenizer, settings=settings, **more)


def samples_of(dataset: TokenDataset) -> list[tuple[list[int], list[bool]]]:
    return [tuple(column.tolist() for column in dataset.sample(i)) for i in range(len(dataset))]


def test_prepared_samples_are_what_each_row_gives(source, tiny_tokenizer_dir):
    dataset = opened(source, tiny_tokenizer_dir)
    tokenise = RowTokenizer(tiny_tokenizer_dir, SETTINGS)
    rows = source.read_bytes().splitlines()
    expected = [(s.input_ids, s.loss_mask) for row, line in enumerate(rows) for s in tokenise(row, line).samples]
    assert samples_of(dataset) == expected
    assert dataset.lengths(np.arange(len(dataset))).tolist() == [len(ids) for ids, _ in expected]
    assert dataset.meta.tokens == sum(len(ids) for ids, _ in expected)
    assert dataset.meta.supervised_tokens == sum(sum(mask) for _, mask in expected)
    assert dataset.meta.longest_tokens == max(len(ids) for ids, _ in expected)
    assert dataset.meta.largest_token_id == max(max(ids) for ids, _ in expected)


def test_second_open_prepares_nothing(source, tiny_tokenizer_dir):
    first = opened(source, tiny_tokenizer_dir)
    made = first.directory.stat().st_ino
    calls = []
    again = opened(source, tiny_tokenizer_dir, on_progress=calls.append)
    assert again.directory.stat().st_ino == made
    assert not calls
    assert again.fingerprint == first.fingerprint


@pytest.mark.parametrize("change", ["template", "source", "settings"])
def test_stale_cache_is_prepared_again(change, source, tmp_path, caplog):  # case 31
    tokenizer = write_tiny_tokenizer(tmp_path / "tokenizer")
    first = opened(source, tokenizer)
    settings = SETTINGS
    if change == "template":
        write_tiny_tokenizer(tokenizer, tiny.CHATML_DEFAULT_SYSTEM)
    elif change == "source":
        write_jsonl(source, conversations(20, seed=1))
    else:
        settings = PrepareSettings(max_length_tokens=32)
    with caplog.at_level(logging.WARNING):
        second = opened(source, tokenizer, settings)
    said = {"template": "tokenizer: chat_template.jinja changed", "source": "source changed"}
    assert said.get(change, "settings: max_length_tokens changed") in caplog.text
    assert second.fingerprint != first.fingerprint
    # Who has the old one open goes on reading it: its files are gone by name only.
    assert len(samples_of(first)) == 20


def test_fingerprint_depends_on_samples_only(source, tiny_tokenizer_dir, tmp_path):
    copy = shutil.copy(source, tmp_path / "copy.jsonl")
    first, second = opened(source, tiny_tokenizer_dir), opened(copy, tiny_tokenizer_dir)
    assert first.directory != second.directory
    assert first.fingerprint == second.fingerprint


def test_rows_that_give_nothing_are_counted_by_reason(tmp_path, tiny_tokenizer_dir, caplog):  # cases 16, 19
    source = tmp_path / "rows.jsonl"
    good = json.dumps(one_turn("one?", "two three"))
    odd = json.dumps({"messages": [{"role": "user", "content": "x"}, {"role": "laguna_s", "content": "y"}]})
    source.write_text("\n".join([good, "", "[]", odd, odd, "nope", '[{"role": "assistant", "content": "x"}]', good]))
    with caplog.at_level(logging.WARNING):
        meta = opened(source, tiny_tokenizer_dir).meta
    counts = {reason: (count.count, count.first_row) for reason, count in meta.dropped.items()}
    assert counts == {
        "blank line": (1, 1),
        "no messages": (1, 2),
        "unknown role, map it with data.role_aliases: laguna_s": (2, 3),
        "not valid JSON": (1, 5),
        "an answer without a question before it": (1, 6),
    }
    assert (meta.rows, meta.samples) == (8, 2)
    assert "dropped 2 (of 8 rows): unknown role, map it with data.role_aliases: laguna_s; first in row 4" in caplog.text
    assert [opened(source, tiny_tokenizer_dir).source_row(i) for i in range(2)] == [0, 7]


def test_template_errors_are_counted_and_the_rest_prepared(tmp_path):  # case 18
    tokenizer = write_tiny_tokenizer(tmp_path / "tokenizer", tiny.STRICT)
    bad = {"messages": [{"role": "system", "content": "s"}, *one_turn("a", "b c")["messages"]]}
    source = write_jsonl(tmp_path / "rows.jsonl", [bad, one_turn("one?", "two three"), bad])
    meta = opened(source, tokenizer).meta
    assert meta.samples == 1
    assert meta.dropped["the chat template refused it"].count == 2
    assert "roles must alternate" in meta.dropped["the chat template refused it"].example


def tokens_in(tokenizer_dir, text: str) -> int:
    return len(RowTokenizer(tokenizer_dir, SETTINGS)._chat._ids(text))


def test_samples_without_two_adjacent_supervised_tokens_are_dropped(tmp_path, tiny_tokenizer_dir):  # cases 1 to 4
    header = tokens_in(tiny_tokenizer_dir, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")
    rows = [one_turn("q", "the river flows into a lake"), one_turn("q " * 200, "yes no yes")]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    few = "fewer supervised tokens than data.min_supervised_tokens"
    late = "its answers begin too late for data.max_length_tokens"
    # One supervised token fits, then two.
    with pytest.raises(UserError, match=f"no usable sample in 2 rows .*{late}"):
        opened(source, tiny_tokenizer_dir, PrepareSettings(header + 1))
    meta = opened(source, tiny_tokenizer_dir, PrepareSettings(header + 2)).meta
    assert (meta.samples, meta.truncated) == (1, 1)
    assert meta.dropped[late].count == 1, "it has supervision, only too late"
    with pytest.raises(UserError, match=f"no usable sample in 2 rows .2 x {few}"):
        opened(source, tiny_tokenizer_dir, PrepareSettings(512, min_supervised_tokens=100))


def test_single_supervised_tokens_apart_are_dropped(tmp_path):  # cases 1 to 4
    """Enough supervised tokens by count, but no block could start: its anchor and first target must both be."""
    template = "{%- for m in messages %}{{ m.role + ':' + m.content + '\\n' }}{%- endfor %}"
    template += "{%- if add_generation_prompt %}{{ 'assistant:' }}{%- endif %}"
    tokenizer = write_tiny_tokenizer(tmp_path / "tokenizer", template)
    apart = {"messages": one_turn("a", "a")["messages"] * 3}
    source = write_jsonl(tmp_path / "rows.jsonl", [apart, one_turn("a", "the river flows")])
    meta = opened(source, tokenizer, PrepareSettings(512)).meta
    assert meta.samples == 1
    assert {reason: count.count for reason, count in meta.dropped.items()} == {"no two adjacent supervised tokens": 1}


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_overlong_samples_are_cut_or_dropped(overlong, tmp_path, tiny_tokenizer_dir):
    rows = [one_turn("q", "the river " * 100), one_turn("q", "yes no")]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    meta = opened(source, tiny_tokenizer_dir, PrepareSettings(40, overlong=overlong)).meta
    if overlong == "truncate":
        assert (meta.samples, meta.truncated, meta.longest_tokens, meta.dropped) == (2, 1, 40, {})
    else:
        assert (meta.samples, meta.truncated) == (1, 0)
        assert meta.dropped["longer than data.max_length_tokens"].count == 1


def test_empty_source_is_refused_and_leaves_nothing_behind(tmp_path, tiny_tokenizer_dir):
    source = write_jsonl(tmp_path / "rows.jsonl", [])
    with pytest.raises(UserError, match="no usable sample in 0 rows"):
        opened(source, tiny_tokenizer_dir)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".rows.jsonl.prepared.lock", "rows.jsonl"]


@pytest.mark.slow  # each worker imports transformers anew
@pytest.mark.timeout(300)
def test_workers_give_the_same_dataset_in_the_same_order(tmp_path, tiny_tokenizer_dir):
    source = write_jsonl(tmp_path / "rows.jsonl", [*conversations(CHUNK_ROWS + 40), [], *conversations(20, seed=3)])
    alone = opened(source, tiny_tokenizer_dir, prepared_dir=tmp_path / "one")
    together = opened(source, tiny_tokenizer_dir, prepared_dir=tmp_path / "two", num_workers=2)
    assert together.meta == alone.meta
    assert samples_of(together) == samples_of(alone)


def test_rows_are_read_as_they_are_needed(tiny_tokenizer_dir):  # case 78, I2
    read = []

    def endless():
        line = json.dumps(one_turn("one?", "two")).encode()
        while True:
            read.append(None)
            yield line

    outcomes = tokenise_rows(endless(), tiny_tokenizer_dir, SETTINGS, 1)
    for _ in range(5):
        next(outcomes)
    assert len(read) <= CHUNK_ROWS


def _write(directory, count: int) -> None:
    with DatasetWriter(directory) as writer:
        for row in range(count):
            writer.add([1, 2, 3], [False, True, True], row=row)
        writer.finish(recipe={}, tokenizer=TokenizerFacts(10), rows=count, truncated=0, dropped={})


def test_opening_takes_no_memory_for_samples(tmp_path):  # case 78, I2
    for name, count in (("small", 10), ("large", 20_000)):
        _write(tmp_path / name, count)
    peaks = {}
    for name in ("small", "small", "large"):  # the first only warms caches
        tracemalloc.start()
        dataset = TokenDataset(tmp_path / name)
        dataset.sample(len(dataset) - 1)
        peaks[name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks["large"] < peaks["small"] + 20_000


def test_dataset_pickles_as_its_path(tmp_path):
    _write(tmp_path / "data", 100)
    dataset = TokenDataset(tmp_path / "data")
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 500
    assert samples_of(pickle.loads(pickled)) == samples_of(dataset)


def test_unfinished_writer_leaves_nothing(tmp_path):
    with DatasetWriter(tmp_path / "data") as writer:
        writer.add([1, 2], [True, True], row=0)
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["short", "long", "missing", "meta", "version"])
def test_damaged_directory_is_refused(damage, tmp_path):
    _write(tmp_path / "data", 5)
    tokens, meta = tmp_path / "data" / "tokens.bin", tmp_path / "data" / "meta.json"
    if damage == "short":
        tokens.write_bytes(tokens.read_bytes()[:-4])
    elif damage == "long":
        tokens.write_bytes(tokens.read_bytes() + b"1234")
    elif damage == "missing":
        tokens.unlink()
    elif damage == "meta":
        meta.write_text(meta.read_text()[:-10])
    else:
        meta.write_text(meta.read_text().replace('"format_version": 1', '"format_version": 99'))
    with pytest.raises(UserError, match="prepare it again"):
        TokenDataset(tmp_path / "data")


def test_damaged_cache_is_prepared_again(source, tiny_tokenizer_dir):
    directory = opened(source, tiny_tokenizer_dir).directory
    (directory / "tokens.bin").write_bytes(b"")
    assert len(opened(source, tiny_tokenizer_dir)) == 20


def test_prepared_directory_needs_no_tokenizer_and_checks_one_that_is_given(source, tiny_tokenizer_dir, tmp_path):
    directory = opened(source, tiny_tokenizer_dir).directory
    assert len(opened(directory, None)) == 20
    assert len(opened(directory, tiny_tokenizer_dir)) == 20
    other = write_tiny_tokenizer(tmp_path / "other", tiny.STRICT)  # case 31
    with pytest.raises(UserError, match=r"data\.tokenizer: .*chat_template\.jinja changed.*prepare again"):
        opened(directory, other)


@pytest.mark.parametrize("missing", ["none", "path", "unprepared"])
def test_missing_source_is_refused(missing, tmp_path, tiny_tokenizer_dir):
    source = {"none": None, "path": tmp_path / "no.jsonl", "unprepared": tmp_path}[missing]
    with pytest.raises(UserError, match=r"^data\.path: "):
        opened(source, tiny_tokenizer_dir)


def _hold_lock(path, held, release) -> None:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held.set()
        release.wait(30)


def test_two_processes_never_prepare_the_same(source, tiny_tokenizer_dir):
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    holder = context.Process(target=_hold_lock, args=(source.with_name(".rows.jsonl.prepared.lock"), held, release))
    holder.start()
    try:
        assert held.wait(30)
        with pytest.raises(UserError, match=r"data\.wait_timeout_s: 0.3: another process still prepares"):
            opened(source, tiny_tokenizer_dir, wait_timeout_s=0.3)
        assert not is_prepared(source.with_name("rows.jsonl.prepared"))
    finally:
        release.set()
        holder.join(30)
    assert len(opened(source, tiny_tokenizer_dir, wait_timeout_s=30)) == 20
    assert read_meta(source.with_name("rows.jsonl.prepared")).samples == 20


@pytest.mark.parametrize(("ratio", "refused"), [(0.5, True), (0.6, False), (1.0, False)])
def test_file_that_mostly_holds_something_else_is_refused(tmp_path, tiny_tokenizer_dir, ratio, refused):
    good = conversations(4)
    no_conversations = [{"text": "a"}, {"text": "b"}, [], {"messages": [{"role": "user"}]}, {"messages": "x"}]
    rows = [*no_conversations, *good, {"messages": good[0]["messages"][:1]}]  # the last lacks an answer: not malformed
    source = write_jsonl(tmp_path / "rows.jsonl", [*rows[:-1], *({"text": "c"},), rows[-1]])

    if not refused:
        assert opened(source, tiny_tokenizer_dir, max_dropped_ratio=ratio).meta.samples == 4
        return
    with pytest.raises(UserError) as error:
        opened(source, tiny_tokenizer_dir, max_dropped_ratio=ratio)
    assert (error.value.field, error.value.value) == ("data.max_dropped_ratio", ratio)
    assert error.value.fix == (
        "6 of 11 rows are no conversations (3 x no messages, conversations or instruction/output in the row, "
        "2 x no messages, 1 x a message without role or content, 1 x no answer); mend them, or raise this"
    )
    assert not is_prepared(tmp_path / "rows.jsonl.prepared")


def test_directory_that_can_not_be_written_is_refused_by_the_setting_s_name(source, tiny_tokenizer_dir):
    with pytest.raises(UserError) as error:
        opened(source, tiny_tokenizer_dir, prepared_dir=Path("/proc/prepared"))
    assert str(error.value) == (
        "data.prepared_dir: /proc/prepared: can't be written (No such file or directory); give another directory"
    )
