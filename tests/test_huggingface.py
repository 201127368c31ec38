"""Tiny, randomly initialised Hugging Face networks against the brute-force Jacobian."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf

import tangents as tg
from brute import error, jacobian, kernel
from cases import shaken

N = 3
TEXT = {
    "vocab_size": 17,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 12,
    "num_labels": 3,
}
DECODER = TEXT | {"num_key_value_heads": 1, "pad_token_id": 0}
PICTURE = {"image_size": 8, "num_channels": 2, "num_labels": 3}


def text(length=4):
    """Token numbers and a mask; the last token of every second input is padding."""
    ids = torch.randint(1, 17, (N, length))
    mask = torch.ones_like(ids)
    ids[1::2, -1], mask[1::2, -1] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def unpadded(length=4):
    return {"input_ids": torch.randint(1, 17, (N, length))}


def picture(size=8):
    return {"pixel_values": torch.randn(N, 2, size, size)}


def to_and_fro():
    return {"input_ids": torch.randint(1, 17, (N, 4)), "decoder_input_ids": torch.randint(1, 17, (N, 3))}


def sound():
    return {"input_values": torch.randn(N, 60)}


def last_logits(output):
    """Three logits of the last token, of a network that has some for each."""
    return output.logits[:, -1, :3]


@dataclass
class Family:
    network: Any
    config: Any
    options: dict
    inputs: Callable[[], dict]
    outputs: Any = None
    reached: float = 0.95  # at least this share of the parameters goes the factored way
    tolerance: float = 1e-10
    dtype: torch.dtype = torch.float64


FAMILIES = {
    "BERT": Family(hf.BertForSequenceClassification, hf.BertConfig, TEXT, text),
    "RoBERTa": Family(hf.RobertaForSequenceClassification, hf.RobertaConfig, TEXT | {"pad_token_id": 0}, text),
    "DistilBERT": Family(
        hf.DistilBertForSequenceClassification,
        hf.DistilBertConfig,
        {
            "vocab_size": 17,
            "dim": 8,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 12,
            "max_position_embeddings": 12,
            "num_labels": 3,
        },
        text,
    ),
    "ELECTRA": Family(hf.ElectraForSequenceClassification, hf.ElectraConfig, TEXT | {"embedding_size": 6}, text),
    "DeBERTa-v2": Family(
        hf.DebertaV2ForSequenceClassification,
        hf.DebertaV2Config,
        TEXT
        | {
            "relative_attention": True,
            "position_buckets": 4,
            "max_relative_positions": 8,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": False,
            "type_vocab_size": 0,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
        },
        text,
        reached=0.5,
    ),
    "GPT-2": Family(
        hf.GPT2ForSequenceClassification,
        hf.GPT2Config,
        {
            "vocab_size": 17,
            "n_embd": 8,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 12,
            "num_labels": 3,
            "pad_token_id": 0,
        },
        text,
    ),
    "GPT-2 with tied embeddings": Family(
        hf.GPT2LMHeadModel,
        hf.GPT2Config,
        {"vocab_size": 17, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 12},
        unpadded,
        last_logits,
    ),
    "OPT": Family(
        hf.OPTForSequenceClassification,
        hf.OPTConfig,
        {
            "vocab_size": 17,
            "hidden_size": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 12,
            "max_position_embeddings": 12,
            "num_labels": 3,
            "pad_token_id": 0,
            "word_embed_proj_dim": 8,
        },
        text,
    ),
    "Llama": Family(hf.LlamaForSequenceClassification, hf.LlamaConfig, DECODER, text, tolerance=1e-5),
    "Mixtral": Family(
        hf.MixtralForSequenceClassification,
        hf.MixtralConfig,
        DECODER | {"num_local_experts": 3, "num_experts_per_tok": 2},
        text,
        reached=0.25,
        tolerance=1e-4,
        dtype=torch.float32,
    ),
    "T5": Family(
        hf.T5ForConditionalGeneration,
        hf.T5Config,
        {
            "vocab_size": 17,
            "d_model": 8,
            "d_kv": 4,
            "d_ff": 12,
            "num_layers": 2,
            "num_heads": 2,
            "num_decoder_layers": 2,
            "relative_attention_num_buckets": 6,
            "decoder_start_token_id": 0,
        },
        to_and_fro,
        last_logits,
        tolerance=1e-5,
    ),
    "ViT": Family(
        hf.ViTForImageClassification,
        hf.ViTConfig,
        {k: v for k, v in TEXT.items() if k[:3] not in ("voc", "max")} | PICTURE | {"patch_size": 4},
        picture,
        reached=0.9,
    ),
    "Swin": Family(
        hf.SwinForImageClassification,
        hf.SwinConfig,
        PICTURE | {"patch_size": 1, "embed_dim": 4, "depths": [2, 1], "num_heads": [1, 2], "window_size": 2},
        picture,
    ),
    "ConvNeXt": Family(
        hf.ConvNextForImageClassification,
        hf.ConvNextConfig,
        PICTURE
        | {"patch_size": 2, "hidden_sizes": [4, 6], "depths": [1, 1], "num_stages": 2, "layer_scale_init_value": 0.1},
        picture,
    ),
    "ResNet": Family(
        hf.ResNetForImageClassification,
        hf.ResNetConfig,
        {
            "num_channels": 2,
            "embedding_size": 4,
            "hidden_sizes": [4, 6],
            "depths": [1, 1],
            "num_labels": 3,
            "layer_type": "basic",
        },
        lambda: picture(20),
    ),
    "MobileNetV2": Family(
        hf.MobileNetV2ForImageClassification,
        hf.MobileNetV2Config,
        {
            "num_channels": 2,
            "image_size": 32,
            "depth_multiplier": 0.05,
            "min_depth": 2,
            "depth_divisible_by": 2,
            "num_labels": 3,
        },
        lambda: picture(32),
    ),
    "Wav2Vec2": Family(
        hf.Wav2Vec2ForSequenceClassification,
        hf.Wav2Vec2Config,
        {
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 12,
            "conv_dim": [4, 4],
            "conv_stride": [3, 2],
            "conv_kernel": [4, 2],
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "num_labels": 3,
            "classifier_proj_size": 6,
            "num_feat_extract_layers": 2,
        },
        sound,
        reached=0.75,
    ),
}


def build(name):
    """The network in eval mode, its parameters away from their initial values, and inputs."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = family.network(family.config(**family.options))
    model = shaken(model.double()).to(family.dtype).eval()
    torch.manual_seed(1)
    X = {key: value.to(family.dtype) if value.is_floating_point() else value for key, value in family.inputs().items()}
    return model, X


@cache
def expected(name):
    model, X = build(name)
    select = FAMILIES[name].outputs or (lambda output: output.logits)
    return jacobian(model, X, select=select).double()


@pytest.mark.parametrize("way", ["factored", "implicit"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_family(name, way):
    family = FAMILIES[name]
    model, X = build(name)
    reference = expected(name)
    rows, columns = reference.shape
    v, u = torch.randn(columns, 2).to(family.dtype), torch.randn(rows, 2).to(family.dtype)
    J = tg.linearize(model, outputs=family.outputs, way=way).jacobian(X)
    assert error(J @ v, reference @ v.double()) < family.tolerance
    assert error(J.T @ u, reference.T @ u.double()) < family.tolerance
    norms = reference.square().sum(1)
    assert error(J.row_norms_squared(), norms) < family.tolerance


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_kernel_of_family_and_parameters_reached(name):
    family = FAMILIES[name]
    model, X = build(name)
    lin = tg.linearize(model, outputs=family.outputs, way="factored")
    assert error(lin.kernel(X).to_dense(), kernel(expected(name))) < 2 * family.tolerance
    sizes = {key: parameter.numel() for key, parameter in model.named_parameters()}
    generic = sum(sizes[key] for key in lin.jacobian(X).plan.generic)
    assert 1 - generic / sum(sizes.values()) >= family.reached
