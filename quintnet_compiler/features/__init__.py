"""Features, a folder each: the operators, rewrites, lowering and checks that only it needs.

Nothing else imports such a folder: other packages ask operators what they are (:mod:`..ops.extensions`), and this list
for passes. Without its folder and its line a feature is gone, and the compiler is as it was before.
"""

from .async_tp import ASYNC_TP
from .chunked_losses import CHUNKED_LOSSES
from .feature import Feature, Rewrite, add_feature
from .fp8 import FP8
from .hot_experts import HOT_EXPERTS
from .offload import OFFLOAD
from .program_parts import ProgramParts
from .text_generation import TEXT_GENERATION
from .whole_step_graph import WHOLE_STEP_GRAPH

__all__ = ["FEATURES", "Feature", "ProgramParts", "Rewrite"]

FEATURES: tuple[Feature, ...] = (
    add_feature(FP8),
    add_feature(CHUNKED_LOSSES),
    add_feature(OFFLOAD),
    add_feature(ASYNC_TP),
    add_feature(TEXT_GENERATION),
    add_feature(WHOLE_STEP_GRAPH),
    add_feature(HOT_EXPERTS),
)
