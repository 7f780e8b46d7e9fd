"""DTensors of this process as whole tensors: what numbers, random draws and slices of them are."""
