"""Small Hugging Face folders, made here: a Llama without a padding token, and a BERT, each with a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from zenflow.training import alpaca

TEXTS = ["the cat sat on the mat", "a dog and a cat", "what is it", alpaca.WITH_INPUT, alpaca.WITHOUT_INPUT] * 3
BEGIN, END = "<s>", "</s>"


def bpe_tokenizer(folder: Path, *, ends: bool = False, pad: str | None = None, size: int = 500) -> None:
    """Byte-level BPE that begins each text as Llama's does; with `ends` it ends it too, as some do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[BEGIN, END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    tail = f" {END}" if ends else ""
    made.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A{tail}", special_tokens=[(BEGIN, 0), (END, 1)]
    )
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token=BEGIN, eos_token=END, pad_token=pad).save_pretrained(
        folder
    )


def llama_folder(folder: Path, *, tied: bool = False, shard: str = "1GB", **tokenizer) -> nn.Module:
    """Two layers over a vocabulary of 500; `shard` is the size of a weights file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=500,
        intermediate_size=67,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
        **sizes,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size=shard)
    bpe_tokenizer(folder, **tokenizer)
    return model.eval()


def bert_folder(folder: Path) -> nn.Module:
    """Two layers with token types, and word pieces."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made.train_from_iterator(
        _words(), trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    )
    made.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 67}
    model = BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes))
    model.save_pretrained(folder)
    return model.eval()


def _words() -> Iterator[str]:
    yield from TEXTS
    yield from "abcdefghijklmnopqrstuvwxyz"
