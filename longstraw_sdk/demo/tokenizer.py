"""A byte-level tokenizer built in code: token id `b` is byte `b`, special tokens follow."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = "<|eos|>"
PAD = "<|pad|>"
EOS_ID = 256
PAD_ID = 257


def _byte_alphabet() -> list[str]:
    """The printable character that the ByteLevel pre-tokenizer writes for each byte; index is the byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet, n_shifted = [], 0
    for byte in range(256):
        if byte in printable:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(256 + n_shifted))
            n_shifted += 1
    return alphabet


def byte_tokenizer(model_max_length: int = 8192) -> PreTrainedTokenizerFast:
    """256 bytes, end of sequence and padding; pads on the left, adds nothing to a prompt, decodes without loss."""
    vocab = {character: byte for byte, character in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )
    if (fast.eos_token_id, fast.pad_token_id) != (EOS_ID, PAD_ID):
        raise AssertionError(f"special ids moved: eos {fast.eos_token_id}, pad {fast.pad_token_id}")
    return fast
