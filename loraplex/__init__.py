"""loraplex serves thousands of LoRA fine-tunes of one base model from the same GPUs."""
