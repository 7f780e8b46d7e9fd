"""Checkpoints in the formats of others: folders of torch.distributed.checkpoint, and safetensors of Hugging Face."""
