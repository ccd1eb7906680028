"""What was lost and what it costs: descent quality, lost updates, memory by category."""

from .memory import track_memory
from .watch import Descent, Watch, watch

__all__ = ["Descent", "Watch", "track_memory", "watch"]
