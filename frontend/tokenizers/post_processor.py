"""The post-processor that puts BOS before a text and EOS behind it."""

from tokenizers.processors import TemplateProcessing


def bos_eos_processor(
    bos: tuple[str, int] | None, eos: tuple[str, int] | None
) -> TemplateProcessing:
    """A template with these (token, id) pairs around the text; with neither it adds nothing."""
    named = {name: pair for name, pair in (("bos", bos), ("eos", eos)) if pair}
    pieces = [*(["bos:0"] if bos else []), "$A:0", *(["eos:0"] if eos else [])]
    specials = [
        {"id": name, "ids": [token_id], "tokens": [token]}
        for name, (token, token_id) in named.items()
    ]
    return TemplateProcessing(single=pieces, special_tokens=specials)
