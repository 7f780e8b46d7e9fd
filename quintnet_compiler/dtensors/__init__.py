"""DTensors of this process as whole tensors: numbers, random draws and slices of them."""
