"""Map the chat template of an exported model for Ollama."""

from __future__ import annotations

from pathlib import Path


def ollama_modelfile(directory: Path, gguf: str, *, thinking: bool) -> str:
    """Return the Modelfile for a GGUF file of the model in `directory`. TemplateError if its chat template cannot be
    mapped."""
    from tandem.text.ollama_modelfile import modelfile
    from tandem.text.renderer import Renderer
    from tandem.text.tokenizer import load_tokenizer

    return modelfile(Renderer(load_tokenizer(str(directory)), thinking=thinking), gguf)
