"""An exported drafter is read by others' code as it is by ours, and drafts the same blocks there."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter_trainer.decode import BlockDrafter, decode_blocks
from drafter_trainer.errors import CheckpointError, TrainerError, UserError
from drafter_trainer.export import export_drafter, load_drafter
from drafter_trainer.head import TargetHead
from drafter_trainer.target_runner import TargetRunner
from tests.support.decoding import own_answers, pack_answers, train_drafter
from tests.support.tiny_targets import LAYERS, some_prompt, tiny_drafter, tiny_target

PROMPT_LENGTHS = (7, 15, 22)
NEW_TOKENS = 32
BLOCK = 5


def _trained(architecture: str):
    """A target, a drafter that is right sometimes, and prompts with the target's answers."""
    target = tiny_target(architecture)
    drafter = tiny_drafter(target, layers=2, taps=(0, 2), block_size=BLOCK)
    pairs = own_answers(target, [some_prompt(n, seed=n) for n in PROMPT_LENGTHS], max_new_tokens=NEW_TOKENS)
    train_drafter(drafter, target, pack_answers(target, drafter, pairs[:2]), steps=30)
    return target, drafter, pairs


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def trained(request):
    torch.manual_seed(3)
    return _trained(request.param)


@pytest.fixture
def exported(trained, tmp_path):
    target, drafter, _ = trained
    scale = TargetHead.from_model(target).embedding_scale
    return export_drafter(
        drafter.config, drafter.state_dict(), tmp_path / "drafter", dtype=torch.float32, embedding_scale=scale
    )


def _ours(target, drafter, prompt, *, eos_ids=()):
    runner = TargetRunner(target, target_layer_ids=drafter.config.target_layer_ids)
    blocks = BlockDrafter(drafter, TargetHead.from_model(target))
    return decode_blocks(runner, blocks, prompt, max_new_tokens=NEW_TOKENS, eos_ids=eos_ids)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_exported_drafter_decodes_alike_with_the_published_package(trained, exported, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)  # its statistics read a CUDA clock
    dflash = pytest.importorskip(
        "dflash.model", reason="PyPI package dflash is not installed: pip install --no-deps dflash"
    )
    target, drafter, pairs = trained
    theirs = dflash.DFlashDraftModel.from_pretrained(exported, dtype=torch.float32).eval()
    accepted = 0
    for prompt, answer in pairs:
        eos = answer[-4]  # both must end at a token: at a limit their last block is shorter than ours
        ours = _ours(target, drafter, prompt, eos_ids={eos})
        stats = dflash.dflash_generate(
            theirs,
            target,
            torch.tensor([prompt]),
            max_new_tokens=2 * NEW_TOKENS,
            stop_token_ids=[eos],
            return_stats=True,
        )
        assert stats.output_ids[0, len(prompt) :].tolist() == list(ours.token_ids)
        assert stats.acceptance_lengths == [r.emitted for r in ours.rounds]
        accepted += sum(r.accepted for r in ours.rounds)
    assert accepted > 0, "nothing was accepted: nothing was shown"


def test_exported_drafter_decodes_alike_with_transformers(trained, exported) -> None:
    target, drafter, pairs = trained
    theirs = _as_transformers_assistant(exported)
    prompt, answer = pairs[0]
    eos = answer[-4]
    ours = _ours(target, drafter, prompt, eos_ids={eos})
    calls = []
    handle = target.register_forward_hook(lambda *_: calls.append(1))
    try:
        output = target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            assistant_model=theirs,
            speculation_type="dflash",
            max_new_tokens=2 * NEW_TOKENS,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=0,
        )
    finally:
        handle.remove()
    assert output[0, len(prompt) :].tolist() == list(ours.token_ids)
    assert len(calls) - 1 == len(ours.rounds)  # one of theirs is the prefill


def _as_transformers_assistant(directory):
    """The same weights in the class that transformers drafts DFlash blocks with."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "MuseGlimmerAssistantModel"):
        pytest.skip("this transformers has no DFlash decoding")
    published = json.loads((directory / "config.json").read_text())
    copied = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "layer_types", "block_size",
        "mask_token_id", "target_layer_ids",
    )  # fmt: skip
    config = transformers.MuseGlimmerAssistantConfig(**{key: published[key] for key in copied})
    model = transformers.MuseGlimmerAssistantModel(config).eval()
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    weights = {renamed.get(k, k): v for k, v in load_file(directory / "model.safetensors").items()}
    model.load_state_dict(weights, strict=True)
    return model


def test_automodel_finds_the_published_class(trained, exported) -> None:
    pytest.importorskip("dflash.model", reason="PyPI package dflash is not installed: pip install --no-deps dflash")
    from transformers import AutoModel  # noqa: PLC0415 - seconds

    model = AutoModel.from_pretrained(exported, trust_remote_code=True)
    assert type(model).__name__ == "DFlashDraftModel"
    assert model.block_size == BLOCK


def test_loaded_drafter_computes_what_the_trained_one_did(trained, exported) -> None:
    # case 91: compare logits, not names
    target, drafter, pairs = trained
    loaded = load_drafter(exported)
    assert loaded.config.block_size == drafter.config.block_size
    head, prompt = TargetHead.from_model(target), pairs[0][0]
    features = TargetRunner(target, target_layer_ids=(0, 2)).prefill(torch.tensor(prompt)).features_RC
    logits = []
    for one in (drafter, loaded):
        blocks = BlockDrafter(one, head)
        blocks.read(features)
        logits.append(blocks.logits(7))
    assert torch.equal(*logits)


def test_config_has_every_key_in_every_place_that_readers_look(trained, exported) -> None:
    # cases 92, 93, 95, 96
    _, drafter, _ = trained
    published = json.loads((exported / "config.json").read_text())
    nested = published["dflash_config"]
    for place in (published, nested):
        assert place["block_size"] == BLOCK
        assert place["mask_token_id"] == drafter.config.mask_token_id
        assert place["target_layer_ids"] == [0, 2]
    assert published["rope_theta"] == published["rope_parameters"]["rope_theta"] == drafter.config.rope_theta
    assert published["num_target_layers"] == LAYERS
    assert published["architectures"] == ["DFlashDraftModel"]
    assert set(load_file(exported / "model.safetensors")) == set(drafter.state_dict())


def test_no_draft_vocabulary_is_written_and_one_that_is_given_is_refused(trained, exported) -> None:
    # cases 61, 62, 63: drafts are ids of the target, so there is no map to be stale, missing or of other data
    target, _, _ = trained
    assert json.loads((exported / "config.json").read_text())["vocab_size"] == target.config.vocab_size
    path = exported / "model.safetensors"
    weights = load_file(path)
    assert not {"d2t", "t2d", "lm_head.weight"} & set(weights)
    save_file({**weights, "d2t": torch.arange(32)}, path)
    with pytest.raises(CheckpointError, match=r"d2t is \(32,\), not None"):
        load_drafter(exported)


@pytest.mark.parametrize("key", ["target_layer_ids", "mask_token_id", "block_size", "num_target_layers"])
def test_config_without_a_key_that_readers_would_guess_is_refused(exported, key: str) -> None:
    # case 95
    path = exported / "config.json"
    published = json.loads(path.read_text())
    published.pop(key, None)
    published["dflash_config"].pop(key, None)
    path.write_text(json.dumps(published))
    with pytest.raises(CheckpointError, match=key):
        load_drafter(exported)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_written_and_read_in_the_asked_dtype(trained, tmp_path, dtype: torch.dtype) -> None:
    _, drafter, _ = trained
    directory = export_drafter(drafter.config, drafter.state_dict(), tmp_path / "d", dtype=dtype)
    assert {t.dtype for t in load_file(directory / "model.safetensors").values()} == {dtype}
    assert {p.dtype for p in load_drafter(directory).parameters()} == {dtype}
    assert json.loads((directory / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_weights_that_are_not_finite_or_do_not_fit_are_never_written(trained, tmp_path) -> None:
    _, drafter, _ = trained
    weights = {name: t.clone() for name, t in drafter.state_dict().items()}
    weights["fc.weight"][0, 0] = float("nan")
    with pytest.raises(TrainerError, match=r"not finite: fc\.weight"):
        export_drafter(drafter.config, weights, tmp_path / "d")
    del weights["fc.weight"]
    with pytest.raises(TrainerError, match=r"1 tensors do not fit .* fc\.weight is None"):
        export_drafter(drafter.config, weights, tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_export_is_replaced_and_other_files_are_not(trained, exported, tmp_path) -> None:
    _, drafter, _ = trained
    export_drafter(drafter.config, drafter.state_dict(), exported)
    assert load_drafter(exported).fc.weight.dtype == torch.bfloat16
    (exported / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        export_drafter(drafter.config, drafter.state_dict(), exported)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        export_drafter(drafter.config, drafter.state_dict(), tmp_path / "file")


def test_torn_weights_are_noticed(exported) -> None:
    path = exported / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is no drafter"):
        load_drafter(exported)
