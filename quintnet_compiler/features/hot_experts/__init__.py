"""Hot experts: ranks have copies of the experts to which most rows go, and these rows stay where they are."""

from .feature import HOT_EXPERTS

__all__ = ["HOT_EXPERTS"]
