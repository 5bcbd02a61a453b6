"""Read a model from a GGUF file, and write it once as a directory in Hugging Face format.

Trainer, engines, bridges and planner then read that directory as they read any other. Import `model_directory` from
directory.py; header.py reads the file, families.py knows the models, tokenizer.py rebuilds the tokenizer.
Nothing here imports torch.
"""
