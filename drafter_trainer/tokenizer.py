"""The target's tokenizer: loading it, what the rest must know of it, and which token stands for "to be drafted".

Owns every rule about special ids. Digest and facts need no transformers, so a prepared dataset opens without it.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafter_trainer.errors import UserError

__all__ = ["TokenizerFacts", "file_digest", "load_tokenizer", "resolve_mask_token_id", "tokenizer_digests"]

# Whatever decides tokens or template, by the names that transformers reads.
_FILE_PATTERNS = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
)
_READ_BYTES = 2**20


@dataclass(frozen=True)
class TokenizerFacts:
    """What is recorded of a tokenizer beside the data it made."""

    num_tokens: int
    """len(tokenizer): ids from here on belong to no text."""
    mask_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_id: int | None = None
    unk_token_id: int | None = None

    @classmethod
    def of(cls, tokenizer: Any) -> TokenizerFacts:
        """The facts of a loaded tokenizer."""
        ids = {name: getattr(tokenizer, name) for name in asdict(cls(0)) if name != "num_tokens"}
        return cls(num_tokens=len(tokenizer), **ids)


def load_tokenizer(directory: Path | None) -> Any:
    """The tokenizer in a local directory; it must have a chat template.

    Raises:
        UserError: No directory, none in it, or no chat template.
    """
    if directory is None:
        raise UserError("data.tokenizer", None, "needed to turn conversations into tokens; give the target's directory")
    tokenizer_digests(directory)
    # Seconds of import: mistakes in the path are told before.
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            "data.tokenizer", directory, f"can't be loaded ({reason}); give the target's directory"
        ) from error
    if not tokenizer.chat_template:
        raise UserError("data.tokenizer", directory, "has no chat template; give the directory that serving uses")
    return tokenizer


def tokenizer_digests(directory: Path) -> dict[str, str]:
    """Digest of each file that decides tokens or template, by name.

    Raises:
        UserError: There is no such directory, or no tokenizer in it.
    """
    if not directory.is_dir():
        raise UserError("data.tokenizer", directory, "no such directory; give the one with the target's tokenizer")
    files = {file for pattern in _FILE_PATTERNS for file in directory.glob(pattern) if file.is_file()}
    if not files:
        raise UserError("data.tokenizer", directory, "holds no tokenizer; give the target's directory")
    return {file.relative_to(directory).as_posix(): file_digest(file) for file in sorted(files)}


def file_digest(file: Path) -> str:
    """Digest of a file's content, read in pieces."""
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while piece := stream.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def resolve_mask_token_id(explicit: int | None, facts: TokenizerFacts, *, vocab_size: int) -> int:
    """The row of the target's embedding that stands for a token still to be drafted.

    In order: the explicit id; the tokenizer's own mask token if the embedding has its row; the first row that no token
    of the tokenizer uses. Never pad, end or unknown: the drafter would learn that real tokens mean nothing.

    Args:
        explicit: `drafter.mask_token_id` as given.
        facts: Of the target's tokenizer.
        vocab_size: Rows of the target's embedding.

    Raises:
        UserError: The explicit id is out of range or taken, or there is no free row to fall back on.
    """
    taken = {"pad": facts.pad_token_id, "end": facts.eos_token_id, "unknown": facts.unk_token_id}
    if explicit is not None:
        if not 0 <= explicit < vocab_size:
            raise UserError(
                "drafter.mask_token_id",
                explicit,
                f"the target's vocabulary has {vocab_size} rows; give an id below that",
            )
        names = [name for name, token_id in taken.items() if token_id == explicit]
        if names:
            raise UserError(
                "drafter.mask_token_id", explicit, f"it is the {names[0]} token; give a row that no text uses"
            )
        return explicit
    own = facts.mask_token_id
    if own is not None and 0 <= own < vocab_size and own not in taken.values():
        return own
    if facts.num_tokens < vocab_size:
        return facts.num_tokens
    raise UserError(
        "drafter.mask_token_id",
        None,
        f"the tokenizer has no usable mask token and its {facts.num_tokens} tokens fill the target's {vocab_size} "
        "rows; give the id of a token that never occurs in text",
    )
