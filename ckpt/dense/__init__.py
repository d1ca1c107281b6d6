"""Dense models that were published by others, as sources: folders of Hugging Face and GGUF files."""
