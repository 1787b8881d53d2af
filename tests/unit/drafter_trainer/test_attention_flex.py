"""The CUDA kernel's mask and tiles, run forward on the CPU, against the other kernel and the dense mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_trainer import attention_flex
from drafter_trainer.attention import BlockLayout, Visibility, attend
from drafter_trainer.attention_flex import TILE, _bucket, _build_mask, _tiles, attend_flex
from tests.support.dense_reference import dense_mask

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@st.composite
def long_layouts(draw: st.DrawFn) -> BlockLayout:
    """Documents and blocks over several tiles."""
    lengths = tuple(draw(st.lists(st.integers(1, 400), min_size=1, max_size=3)))
    size = draw(st.sampled_from([3, 4, 8, 16, 48]))
    places = [(d, a) for d, length in enumerate(lengths) for a in range(0, length, 1 + length // 40)]
    blocks = sorted(draw(st.lists(st.sampled_from(places), min_size=1, max_size=40, unique=True)))
    document, position = (torch.tensor(part) for part in zip(*blocks, strict=True))
    return BlockLayout(lengths, document, position, size)


VISIBILITIES = st.builds(Visibility, window=st.none() | st.integers(1, 500), causal=st.booleans())


@settings(max_examples=30)
@given(long_layouts(), VISIBILITIES)
def test_tiles_and_mask_function_give_the_dense_mask(layout: BlockLayout, visibility: Visibility) -> None:
    mask = _build_mask(layout, visibility, torch.device("cpu"))
    q = torch.arange(mask.queries)[:, None]
    k = torch.arange(mask.context + mask.queries)[None]
    zero = torch.zeros(1, dtype=torch.int64)
    by_function = mask.blocks.mask_mod(zero, zero, q, k)

    tokens, queries = sum(layout.lengths), len(layout.position_A) * layout.block_size
    blocks = list(zip(layout.document_A.tolist(), layout.position_A.tolist(), strict=True))
    dense = dense_mask(
        layout.lengths, blocks, block_size=layout.block_size, window=visibility.window, causal=visibility.causal
    )
    assert torch.equal(by_function[:queries, :tokens], dense[:, :tokens])
    assert torch.equal(by_function[:queries, mask.context : mask.context + queries], dense[:, tokens:])
    assert not by_function[:queries, tokens : mask.context].any(), "padding is seen"
    assert by_function.any(1).all(), "a query without any key"

    by_tile = by_function.view(mask.queries // TILE, TILE, -1, TILE).transpose(1, 2).flatten(2)
    partial, full = _tiles(layout, visibility, mask.context, mask.queries)
    assert not (partial & full).any()
    assert not (by_tile.any(2) & ~(partial | full)).any(), "a tile with a visible key is left out"
    assert by_tile[full].all(), "a tile taken as full hides a key"


@pytest.mark.parametrize("visibility", [Visibility(), Visibility(window=70, causal=True)], ids=str)
def test_flex_equals_the_chunked_kernel(visibility: Visibility) -> None:
    positions = torch.tensor([0, 130, 299, 5, 64])
    layout = BlockLayout((300, 90), torch.tensor([0, 0, 0, 1, 1]), positions, 6)
    shapes = ((30, 4, 16), (390, 2, 16), (390, 2, 16), (30, 2, 16), (30, 2, 16))
    q, kc, vc, kb, vb = (torch.randn(shape) for shape in shapes)
    flex = attend_flex(q, (kc, vc), (kb, vb), layout=layout, visibility=visibility)
    chunked = attend(q, (kc, vc), (kb, vb), layout=layout, visibility=visibility)
    torch.testing.assert_close(flex, chunked, atol=1e-5, rtol=1e-5)


def test_layers_share_a_mask_and_other_layouts_do_not() -> None:
    def layout() -> BlockLayout:
        return BlockLayout((40,), torch.tensor([0]), torch.tensor([9]), 4)

    first, second = layout(), layout()
    inputs = [torch.randn(n, 1, 16) for n in (4, 40, 40, 4, 4)]
    for one in (first, first, second):
        attend_flex(
            inputs[0], (inputs[1], inputs[2]), (inputs[3], inputs[4]), layout=one, visibility=Visibility(window=5)
        )
    assert len(first.memo) == len(second.memo) == 1
    assert first.memo is not second.memo


def test_buckets_are_few() -> None:
    sizes = [_bucket(n) for n in range(8193)]
    assert all(n <= size < max(2 * n, TILE + 1) and size % TILE == 0 for n, size in enumerate(sizes))
    assert sorted(set(sizes)) == [128, 256, 512, 1024, 2048, 4096, 8192]


def test_nothing_is_compiled_again_for_other_documents_and_anchors_of_the_same_buckets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dynamo's guards, with a backend that runs eagerly: they are what decides about compiling on CUDA too."""
    torch.compiler.reset()
    monkeypatch.setattr(attention_flex, "flex_attention", attention_flex._compiled(backend="eager"))

    def run(layout: BlockLayout, visibility: Visibility) -> None:
        queries, tokens = len(layout.position_A) * layout.block_size, sum(layout.lengths)
        q, kc, vc, kb, vb = (torch.randn(n, 2, 16) for n in (queries, tokens, tokens, queries, queries))
        flex = attend_flex(q, (kc, vc), (kb, vb), layout=layout, visibility=visibility)
        chunked = attend(q, (kc, vc), (kb, vb), layout=layout, visibility=visibility)
        torch.testing.assert_close(flex, chunked, atol=1e-5, rtol=1e-5)

    kinds = Visibility(), Visibility(window=70, causal=True)
    for visibility in kinds:
        run(BlockLayout((150,), torch.tensor([0, 0]), torch.tensor([3, 140]), 4), visibility)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for anchors in ([5, 77, 201], [0], list(range(31))):
            document = torch.tensor([0] * (len(anchors) - 1) + [1])
            layout = BlockLayout((202, 50), document, torch.tensor([*anchors[:-1], min(anchors[-1], 49)]), 4)
            for visibility in kinds:
                run(layout, visibility)
        with pytest.raises(torch._dynamo.exc.RecompileError):  # the watch does see compilations
            run(BlockLayout((300,), torch.tensor([0]), torch.tensor([9]), 4), Visibility())
    torch.compiler.reset()
