"""LoRA adapters: read from PEFT's files, kept by a manager, added to a model's linear layers."""
