"""The metadata of a demo GGUF file: config, n-gram constants and tokenizer, written and read back."""

import json
from collections.abc import Sequence

from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tools.demo_model.config import (
    CHAT_TEMPLATE,
    CONTROL_TOKENS,
    END_THINK,
    ENDOFTEXT,
    IM_END,
    IMAGE_PAD,
    THINK,
    DemoConfig,
)
from tools.demo_model.ngrams import ngram_hash
from tools.gguf_writer import GGUFWriter, ValueType

QWEN35_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How the pre-tokenizer named `qwen35` cuts text before byte-pair merging."""

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_ARCHITECTURE = "qwen4exp"


def write_metadata(
    writer: GGUFWriter, config: DemoConfig, tokenizer: Tokenizer, has_prediction: bool, file_type: int
) -> None:
    """Everything but the tensors. `file_type` is ggml's number for the dominant tensor type."""
    writer.add("general.architecture", ValueType.STRING, _ARCHITECTURE)
    writer.add("general.type", ValueType.STRING, "model")
    writer.add("general.name", ValueType.STRING, "Strata demo")
    writer.add("general.file_type", ValueType.UINT32, file_type)
    writer.add("general.quantization_version", ValueType.UINT32, 2)
    _write_config(writer, config, has_prediction)
    _write_ngrams(writer, config, token_id_of(tokenizer, IMAGE_PAD))
    _write_tokenizer(writer, tokenizer, config.vocab_size)


def token_id_of(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token. Raises ValueError where the tokenizer lacks it."""
    token_id: int | None = tokenizer.token_to_id(token)
    if token_id is None:
        raise ValueError(f"the tokenizer has no token {token!r}")
    return token_id


def _write_config(writer: GGUFWriter, config: DemoConfig, has_prediction: bool) -> None:
    num_blocks = config.num_hidden_layers + int(has_prediction)
    integers = {
        "block_count": num_blocks,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.rotary_dim,
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_dim,
        "full_attention_interval": config.full_attention_interval,
        "hyper_connection.count": config.hc_count,
        "hyper_connection.low_rank": config.hc_lowrank,
        "attention.indexer.head_count": config.indexer_n_heads,
        "attention.indexer.key_length": config.indexer_head_dim,
        "attention.indexer.top_k": config.indexer_budget,
    }
    if has_prediction:
        integers["nextn_predict_layers"] = 1
    for key, value in integers.items():
        writer.add(f"{_ARCHITECTURE}.{key}", ValueType.UINT32, value)
    floats = {"attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": config.rope_theta}
    for key, number in floats.items():
        writer.add(f"{_ARCHITECTURE}.{key}", ValueType.FLOAT32, number)
    sections = [*config.mrope_section, 0]
    writer.add_array(f"{_ARCHITECTURE}.rope.dimension_sections", ValueType.INT32, sections)
    ratios = [
        config.indexer_compress_ratio
        if block >= config.num_hidden_layers or config.is_attention(block)
        else 0
        for block in range(num_blocks)
    ]
    writer.add_array(f"{_ARCHITECTURE}.attention.compress_ratios", ValueType.INT32, ratios)


def _write_ngrams(writer: GGUFWriter, config: DemoConfig, image_token_id: int) -> None:
    constants = ngram_hash(config)
    integers = {
        "ple.ngram_size": config.ngram_size,
        "ple.heads_per_ngram": config.heads_per_ngram,
        "ple.conv_kernel": config.ple_conv_kernel_size,
        "ple.eos_token_id": config.eos_token_id,
        "ple.image_token_id": image_token_id,
        "embedding_length_per_layer_input": config.ple_embed_dim // config.num_ngram_heads,
    }
    for key, value in integers.items():
        writer.add(f"{_ARCHITECTURE}.{key}", ValueType.UINT32, value)
    writer.add_array(f"{_ARCHITECTURE}.ple.layers", ValueType.INT32, [config.ple_layer])
    for key, values in {
        "ple.layer_multipliers": constants.multipliers,
        "ple.head_vocab_sizes": constants.head_vocab_sizes,
        "ple.head_offsets": constants.head_offsets,
    }.items():
        writer.add_array(f"{_ARCHITECTURE}.{key}", ValueType.UINT64, values)


def _write_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, vocab_size: int) -> None:
    stored = json.loads(tokenizer.to_str())
    tokens = [f"[PAD{token_id}]" for token_id in range(vocab_size)]
    types = [_UNUSED] * vocab_size
    for token, token_id in stored["model"]["vocab"].items():
        tokens[token_id], types[token_id] = token, _NORMAL
    for added in stored["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in stored["model"]["merges"]]
    writer.add("tokenizer.ggml.model", ValueType.STRING, "gpt2")
    writer.add("tokenizer.ggml.pre", ValueType.STRING, "qwen35")
    writer.add_array("tokenizer.ggml.tokens", ValueType.STRING, tokens)
    writer.add_array("tokenizer.ggml.token_type", ValueType.INT32, types)
    writer.add_array("tokenizer.ggml.merges", ValueType.STRING, merges)
    end_of_text = token_id_of(tokenizer, ENDOFTEXT)
    writer.add("tokenizer.ggml.eos_token_id", ValueType.UINT32, token_id_of(tokenizer, IM_END))
    writer.add("tokenizer.ggml.padding_token_id", ValueType.UINT32, end_of_text)
    writer.add("tokenizer.ggml.bos_token_id", ValueType.UINT32, end_of_text)
    writer.add("tokenizer.ggml.add_bos_token", ValueType.BOOL, False)
    writer.add("tokenizer.chat_template", ValueType.STRING, CHAT_TEMPLATE)


def read_config(reader: GGUFReader) -> DemoConfig:
    """The config of a file that `write_metadata` wrote. Raises KeyError where a key is missing."""

    def number(key: str) -> int:
        return int(reader.fields[f"{_ARCHITECTURE}.{key}"].contents())

    def real(key: str) -> float:
        # Float32 in the file: rounded to the few digits it was given with.
        return float(f"{reader.fields[f'{_ARCHITECTURE}.{key}'].contents():.6g}")

    def numbers(key: str) -> list[int]:
        return [int(value) for value in reader.fields[f"{_ARCHITECTURE}.{key}"].contents()]

    has_prediction = f"{_ARCHITECTURE}.nextn_predict_layers" in reader.fields
    sizes = numbers("ple.head_vocab_sizes")
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    time_section, height_section, width_section, _ = numbers("rope.dimension_sections")
    config = DemoConfig(
        vocab_size=len(tokens),
        hidden_size=number("embedding_length"),
        num_hidden_layers=number("block_count") - int(has_prediction),
        full_attention_interval=number("full_attention_interval"),
        max_position_embeddings=number("context_length"),
        rms_norm_eps=real("attention.layer_norm_rms_epsilon"),
        num_attention_heads=number("attention.head_count"),
        num_key_value_heads=number("attention.head_count_kv"),
        head_dim=number("attention.key_length"),
        partial_rotary_factor=number("rope.dimension_count") / number("attention.key_length"),
        rope_theta=real("rope.freq_base"),
        mrope_section=(time_section, height_section, width_section),
        indexer_n_heads=number("attention.indexer.head_count"),
        indexer_head_dim=number("attention.indexer.key_length"),
        indexer_budget=number("attention.indexer.top_k"),
        indexer_compress_ratio=max(numbers("attention.compress_ratios")),
        linear_conv_kernel_dim=number("ssm.conv_kernel"),
        linear_key_head_dim=number("ssm.state_size"),
        linear_value_head_dim=number("ssm.inner_size") // number("ssm.time_step_rank"),
        linear_num_key_heads=number("ssm.group_count"),
        linear_num_value_heads=number("ssm.time_step_rank"),
        num_experts=number("expert_count"),
        num_experts_per_tok=number("expert_used_count"),
        moe_intermediate_size=number("expert_feed_forward_length"),
        shared_expert_intermediate_size=number("expert_shared_feed_forward_length"),
        hc_count=number("hyper_connection.count"),
        hc_lowrank=number("hyper_connection.low_rank"),
        ple_layer=numbers("ple.layers")[0],
        ple_embed_dim=number("embedding_length_per_layer_input") * len(sizes),
        ple_conv_kernel_size=number("ple.conv_kernel"),
        ngram_size=number("ple.ngram_size"),
        heads_per_ngram=number("ple.heads_per_ngram"),
        ngram_vocab_size_base=sizes[0],
        eos_token_id=number("ple.eos_token_id"),
    )
    if list(ngram_hash(config).multipliers) != numbers("ple.layer_multipliers"):
        raise ValueError("the file's n-gram multipliers are not those of this project's seed")
    return config


def read_tokenizer(reader: GGUFReader) -> Tokenizer:
    """The tokenizer of a GGUF file whose pre-tokenizer is `qwen35`."""
    tokens: Sequence[str] = reader.fields["tokenizer.ggml.tokens"].contents()
    types: Sequence[int] = reader.fields["tokenizer.ggml.token_type"].contents()
    merges: Sequence[str] = reader.fields["tokenizer.ggml.merges"].contents()
    vocab = {token: token_id for token_id, token in enumerate(tokens) if types[token_id] == _NORMAL}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    added = {
        token_id: tokens[token_id]
        for token_id in range(len(tokens))
        if types[token_id] in (_CONTROL, _USER_DEFINED)
    }
    return byte_level_tokenizer(vocab, pairs, list(added.values()))


def byte_level_tokenizer(
    vocab: dict[str, int], merges: list[tuple[str, str]], added: Sequence[str]
) -> Tokenizer:
    """A byte-pair tokenizer cut by `QWEN35_PATTERN`; `added` tokens get the ids after the vocabulary."""
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN35_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token in added:
        # One at a time: ids are handed out in this order, special or not.
        if token in CONTROL_TOKENS:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token in (THINK, END_THINK):
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
        else:
            raise ValueError(f"unknown added token {token!r}")
    return tokenizer
