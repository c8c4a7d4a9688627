"""The learning problem of `longstraw demo`: prose, byte tokenizer, needle task, tiny models, supervised warm-up."""
