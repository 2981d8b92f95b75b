"""Tables that a module makes by itself: they follow from arguments, and belong to no generation."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from deadpool_megatron.megatron import loop_extras as extras, stand_ins
from deadpool_megatron.state import extras as codec
from tests.gpu.digests import state_digests
from tests.megatron.plain_loop import captured, plain_loop

stand_ins.install()


class Attention(torch.nn.Module):
    """The part of Megatron's multi-latent attention that keeps tables of rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("expert_bias", torch.zeros(4))
        self.rotary_pos_emb = YarnRotaryEmbedding(
            64,
            scaling_factor=40.0,
            original_max_position_embeddings=4096,
            mscale_all_dim=0.0,
            use_cpu_initialization=True,
            cp_group=SimpleNamespace(size=lambda: 1),
        )

    def tables(self, sequence_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As a forward pass with fused rotary embeddings asks for them."""
        cos, sin = self.rotary_pos_emb.get_cached_cos_sin(sequence_length, dtype=torch.bfloat16)
        return cos.clone(), sin.clone()


def same(first: tuple[torch.Tensor, ...], then: tuple[torch.Tensor, ...]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(first, then, strict=True))


@pytest.mark.parametrize("sequence_length", [2048, 8192])
def test_tables_of_yarn_are_the_same_after_a_return_to_before_the_first_pass(sequence_length):
    """Those of a new model are in fp32 and of 4,096 rows. A kernel reads beyond them unasked."""
    made = plain_loop([Attention()])
    (attention,) = made.model_chunks
    first = captured(made)
    before = attention.tables(sequence_length)
    attention.expert_bias += 1
    extras.restore(made, first)
    assert same(attention.tables(sequence_length), before)
    assert not attention.expert_bias.any(), "what training changes comes back"


def test_first_pass_may_be_done_again_for_an_audit():
    made = plain_loop([Attention()])
    kept = codec.decode(codec.encode(extras.capture_passing(made)))
    before = made.model_chunks[0].tables(2048)
    extras.restore_passing(made, kept)
    assert same(made.model_chunks[0].tables(2048), before)


def test_longer_tables_are_neither_state_nor_sent_to_a_buddy():
    made = plain_loop([Attention()])
    sent, digests = len(codec.encode(extras.capture(made))), state_digests(made)
    made.model_chunks[0].tables(16384)
    assert len(codec.encode(extras.capture(made))) == sent
    assert state_digests(made) == digests


@pytest.mark.parametrize("restore", [extras.restore, extras.restore_passing])
def test_buffer_of_another_shape_is_named(restore):
    made = plain_loop([Attention()])
    kept = captured(made)
    made.model_chunks[0].expert_bias = torch.zeros(5)
    with pytest.raises(codec.ExtrasError, match=r"captured: buffer\.0\.expert_bias$"):
        restore(made, kept)
