"""``flex_attention`` in forward: masks that are functions of positions become those of one operator."""
