"""Read a model from a GGUF file, and write it once as a directory in Hugging Face format; write a model as a GGUF file.

Trainer, engines, bridges and planner then read that directory as they read any other. Import `model_directory` from
directory.py, `write_gguf` from writer.py; header.py reads the file, families.py knows the models, tokenizer.py rebuilds
the tokenizer; metadata.py and tokenizer_fields.py say of a model what the file says. Nothing here imports torch.
"""
