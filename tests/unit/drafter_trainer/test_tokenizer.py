from __future__ import annotations

import pytest

from drafter_trainer.errors import UserError
from drafter_trainer.tokenizer import TokenizerFacts, load_tokenizer, resolve_mask_token_id, tokenizer_digests
from tests.support.tiny_tokenizer import build_tiny_tokenizer, write_tiny_tokenizer


def facts(**ids) -> TokenizerFacts:
    return TokenizerFacts(num_tokens=100, **{"pad_token_id": 0, "eos_token_id": 2} | ids)


def test_own_mask_token_is_taken_if_the_embedding_has_its_row():
    assert resolve_mask_token_id(None, facts(mask_token_id=50), vocab_size=128) == 50
    assert resolve_mask_token_id(None, facts(mask_token_id=130), vocab_size=128) == 100


@pytest.mark.parametrize("role", ["pad", "eos", "unk"])
def test_mask_never_falls_back_on_a_token_with_a_meaning(role):  # case 27
    same = facts(mask_token_id=7, **{f"{role}_token_id": 7})
    assert resolve_mask_token_id(None, same, vocab_size=128) == 100
    with pytest.raises(UserError, match="give the id of a token that never occurs"):
        resolve_mask_token_id(None, same, vocab_size=100)


def test_pad_that_is_eos_and_no_mask_token_need_an_explicit_id():  # case 27
    tokenizer = build_tiny_tokenizer(pad_token="<|im_end|>")
    known = TokenizerFacts.of(tokenizer)
    assert known.pad_token_id == known.eos_token_id == 2
    with pytest.raises(UserError, match=r"drafter\.mask_token_id: \(not set\): .*give the id"):
        resolve_mask_token_id(None, known, vocab_size=len(tokenizer))
    assert resolve_mask_token_id(5, known, vocab_size=len(tokenizer)) == 5


def test_first_unused_row_lies_in_the_padded_tail():  # case 28
    assert resolve_mask_token_id(None, facts(), vocab_size=101) == 100


def test_more_tokens_than_rows_is_refused():  # case 28
    with pytest.raises(UserError, match="its 100 tokens fill the target's 90 rows"):
        resolve_mask_token_id(None, facts(), vocab_size=90)


@pytest.mark.parametrize(
    ("explicit", "wrong"),
    [
        (128, "has 128 rows; give an id below that"),
        (-1, "give an id below that"),
        (0, "it is the pad token"),
        (2, "it is the end token"),
    ],
)
def test_explicit_id_is_checked(explicit, wrong):  # cases 27, 28
    with pytest.raises(UserError, match=wrong):
        resolve_mask_token_id(explicit, facts(), vocab_size=128)


def test_explicit_id_in_the_padded_tail_is_fine():  # case 28
    assert resolve_mask_token_id(127, facts(), vocab_size=128) == 127


def test_digests_tell_which_file_changed(tmp_path):  # case 31
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights don't matter")
    before = tokenizer_digests(tmp_path)
    assert "model.safetensors" not in before
    template = tmp_path / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    after = tokenizer_digests(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"chat_template.jinja"}


def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path):
    for directory, wrong in [
        (None, "needed to turn conversations into tokens"),
        (tmp_path / "none", "no such directory"),
        (tmp_path, "holds no tokenizer"),
    ]:
        with pytest.raises(UserError, match=wrong):
            load_tokenizer(directory)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="can't be loaded"):
        load_tokenizer(tmp_path)


def test_tokenizer_without_chat_template_is_refused(tmp_path):
    write_tiny_tokenizer(tmp_path, None)
    with pytest.raises(UserError, match="has no chat template"):
        load_tokenizer(tmp_path)
