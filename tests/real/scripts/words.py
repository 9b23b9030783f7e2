"""A tokenizer of made-up words, for packages that want one."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")


def tokenizer(count):
    """``count`` words "w4", "w5", … after the special ones."""
    names = [*SPECIAL, *(f"w{index}" for index in range(len(SPECIAL), count))]
    words = Tokenizer(WordLevel({name: index for index, name in enumerate(names)}, "<unk>"))
    words.pre_tokenizer = Whitespace()
    return words
