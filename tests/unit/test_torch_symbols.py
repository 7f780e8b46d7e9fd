"""Names of symbols, as ShapeEnv takes them."""

from __future__ import annotations

import sympy

from quintnet_compiler.compat.torch_symbols import DimDynamic, ShapeEnv, constant_source


def test_a_symbol_of_a_named_source_is_made() -> None:
    source = constant_source("rows")
    assert source.name == "rows"
    symbol = ShapeEnv().create_symbol(4, source, dynamic_dim=DimDynamic.DYNAMIC)
    assert isinstance(symbol, sympy.Symbol)
